"""When a training evaluates, saves and stops, all from the step it is at: a resumed one decides as the first did."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import TrainerCallback

from headprune.measure.metrics import Metric
from headprune.recovery.config import TrainConfig

VALUE, LOSS = "eval_metric", "eval_loss"  # of an evaluation in the Trainer's history


class Evaluated(NamedTuple):
    step: int
    value: float
    loss: float | None = None


def evaluations(history: Sequence[dict[str, Any]], start: Evaluated | None) -> list[Evaluated]:
    """Every evaluation so far, that of the model as it was given first."""
    first = [] if start is None else [start]
    return first + [Evaluated(entry["step"], entry[VALUE], entry.get(LOSS)) for entry in history if VALUE in entry]


def best_of(found: Sequence[Evaluated], metric: Metric) -> Evaluated:
    """The best one. Few samples give the same accuracy often, and then the loss decides, and then the first counts."""
    sign = 1 if metric.higher_is_better else -1

    def worth(one: Evaluated) -> tuple[float, float]:
        loss = math.inf if one.loss is None or math.isnan(one.loss) else one.loss
        return (-math.inf if math.isnan(one.value) else sign * one.value), -loss

    return max(found, key=worth)


@dataclass(frozen=True)
class Plan:
    """The steps of a training, and at which of them it evaluates and saves."""

    per_epoch: int
    total: int
    evaluations: frozenset[int]
    save_steps: int | None

    @classmethod
    def of(cls, config: TrainConfig, batches: int, evaluates: bool) -> Plan:
        per_epoch = max(1, math.ceil(batches / config.gradient_accumulation))
        total = max(1, math.ceil(config.epochs * per_epoch))
        share = per_epoch / min(config.evaluations, per_epoch)
        points = {round(share * number) for number in range(1, math.ceil(total / share) + 1)}
        asked = frozenset({point for point in points if point <= total} | {total}) if evaluates else frozenset()
        return cls(per_epoch, total, asked, config.save_steps)

    def saves(self, step: int) -> bool:
        regular = self.save_steps is not None and step % self.save_steps == 0
        return regular or step in self.evaluations or step % self.per_epoch == 0 or step == self.total


class Pace(TrainerCallback):
    """Follows a plan, and stops early where evaluations get no better."""

    def __init__(self, plan: Plan, patience: int | None, metric: Metric | None, start: Evaluated | None) -> None:
        self.plan, self.patience, self.metric, self.start = plan, patience, metric, start

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        if step in self.plan.evaluations:
            control.should_evaluate = True
        if self.plan.saves(step):
            # Losses since the last log are not in a checkpoint, so they are logged before it.
            control.should_save = control.should_log = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.patience is None or self.metric is None:
            return
        found = evaluations(state.log_history, self.start)
        best = best_of(found, self.metric)
        if sum(one.step > best.step for one in found) >= self.patience:
            control.should_training_stop = True


class Teller(TrainerCallback):
    """Tells whoever watches what is logged: the step, how many there are, losses and evaluations."""

    def __init__(self, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self.tell = tell

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero:
            self.tell({**(logs or {}), "step": state.global_step, "steps": state.max_steps})
