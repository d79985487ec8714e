"""Logs steps to TensorBoard, Trackio, Weights & Biases and other integrations of transformers during a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headprune.errors import MissingPackageError
from headprune.extras import need, need_integration
from headprune.measure.curves import shares
from headprune.measure.trajectory import Step
from headprune.search.observers import Observer


class StepLogger(Observer):
    """Logs the measurements after each step through the integrations of transformers' Trainer; to be used as a context
    manager. Nothing is started before the first step, and files are written to `folder`."""

    def __init__(self, report_to: str, folder: Path, *, name: str) -> None:
        need(("accelerate",), "train", "Logging of steps needs")
        need_integration(report_to, "Steps", MissingPackageError)
        self.report_to, self.folder, self.name = report_to, folder, name
        self.dense: Step | None = None
        self._callbacks: list[Any] = []

    def _start(self) -> None:
        from transformers import TrainerControl, TrainerState, TrainingArguments
        from transformers.integrations import get_reporting_integration_callbacks

        # The objects that a Trainer passes to its callbacks; only these three arguments matter here.
        self._args = TrainingArguments(str(self.folder), run_name=self.name, report_to=[self.report_to], use_cpu=True)
        self._state, self._control = TrainerState(), TrainerControl()
        self._callbacks = [kind() for kind in get_reporting_integration_callbacks([self.report_to])]
        self._notify("on_train_begin")

    def _notify(self, event: str, **values: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, event)(self._args, self._state, self._control, model=None, **values)

    def __call__(self, step: Step) -> None:
        if self.dense is None:
            self.dense = step
            self._start()
        self._state.global_step = step.step
        self._notify("on_log", logs={f"eval_{name}": value for name, value in self.values(step).items()})

    def values(self, step: Step) -> dict[str, float]:
        """The logged values of a step: those that were measured and are finite."""
        assert self.dense is not None
        values = {
            "metric": step.metric,
            "low": None if step.interval is None else step.interval.low,
            "high": None if step.interval is None else step.interval.high,
            "agreement": step.agreement,
            "loss": step.loss,
            **step.units,
            "removed": shares([self.dense, step])[1],
            "parameters": step.parameters,
        }
        return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}

    def step(self, step: Step, seconds: Mapping[str, float]) -> None:
        self(step)

    def replayed(self, step: Step) -> None:
        self(step)

    def __enter__(self) -> StepLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self._notify("on_train_end")
