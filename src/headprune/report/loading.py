"""Runs as a report needs them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune.errors import RunError
from headprune.metrics import METRICS, Metric
from headprune.run import read_run
from headprune.trajectory import Step


@dataclass(frozen=True)
class ReportRun:
    """One run: its record and its steps, named so that several can stand side by side."""

    name: str
    path: Path
    record: dict[str, Any]
    steps: list[Step]

    @property
    def settings(self) -> dict[str, Any]:
        return self.record["settings"]

    @property
    def title(self) -> str:
        return Path(str(self.settings["model"])).name

    @property
    def result(self) -> dict[str, Any] | None:
        """None for a run that has not come to its end."""
        return self.record.get("result")

    @property
    def metric(self) -> Metric:
        name = self.result["metric"] if self.result else self.settings.get("metric") or "accuracy"
        return METRICS.get(name, Metric(name, True, METRICS["accuracy"].of))

    @property
    def is_random(self) -> bool:
        return str(self.settings.get("criterion", "")).startswith("random")

    @property
    def stopped_at(self) -> int:
        return self.result["step"] if self.result else len(self.steps) - 1

    @property
    def command(self) -> str:
        """The command that repeats this run."""
        settings = self.settings
        words = ["headprune", "prune", settings["model"], "--data", settings["data"]]
        columns = settings.get("columns") or {}
        flags = {
            **{name: value for name, value in settings.items() if not name.endswith("fingerprint")},
            **{f"{name}_column": value for name, value in columns.items()},
        }
        for name in ("model", "data", "columns"):
            flags.pop(name, None)
        for name, value in flags.items():
            if value is True:
                words.append(f"--{name.replace('_', '-')}")
            elif value is not None and value is not False:
                words += [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join([*words, "--out", str(self.path.name)])


def load_runs(paths: Sequence[str | Path]) -> list[ReportRun]:
    """The runs at these places; a folder of runs, as `compare` writes it, counts as all the runs in it."""
    folders: list[Path] = []
    for path in map(Path, paths):
        inside = [] if (path / "run.json").is_file() else sorted(file.parent for file in path.glob("*/run.json"))
        folders += inside or [path]
    runs = []
    for folder in folders:
        record, steps = read_run(folder)
        if not steps:
            raise RunError(f"{folder} has no step yet, so there is nothing to report; run it first.")
        runs.append(ReportRun(folder.name, folder, record, steps))
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        runs = [ReportRun(f"{run.path.parent.name}/{run.name}", run.path, run.record, run.steps) for run in runs]
    return runs


def finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return None if value is None or not math.isfinite(value) else value
