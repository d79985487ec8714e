"""When a training evaluates, saves and stops. Every decision follows from the step and the Trainer's history, so a
resumed training decides as the first one did.

transformers' `load_best_model_at_end` and `EarlyStoppingCallback` are not enough here: of equal metrics the one with
the lower loss is better, the model before training is a candidate, and a resumed training must not lose its patience.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import TrainerCallback

from headprune.measure.metrics import Metric
from headprune.search.observers import Observer
from headprune.training.config import TrainConfig

VALUE, LOSS = "eval_metric", "eval_loss"  # of an evaluation in the Trainer's history


class Evaluation(NamedTuple):
    step: int
    value: float
    loss: float | None = None


def all_evaluations(history: Sequence[dict[str, Any]], start: Evaluation | None) -> list[Evaluation]:
    """The evaluation before training, where there is one, and those in the Trainer's history."""
    first = [] if start is None else [start]
    return first + [Evaluation(entry["step"], entry[VALUE], entry.get(LOSS)) for entry in history if VALUE in entry]


def best_evaluation(evaluations: Sequence[Evaluation], metric: Metric) -> Evaluation:
    """The one with the best metric. Few samples often give equal accuracies: then the lower loss, then the first."""
    sign = 1 if metric.higher_is_better else -1

    def rank(evaluation: Evaluation) -> tuple[float, float]:
        value, loss = evaluation.value, evaluation.loss
        return -math.inf if math.isnan(value) else sign * value, -math.inf if loss is None or math.isnan(
            loss
        ) else -loss

    return max(evaluations, key=rank)


@dataclass(frozen=True)
class TrainingSchedule:
    """The number of steps, and at which of them a training evaluates and saves."""

    steps_per_epoch: int
    steps: int
    evaluation_steps: frozenset[int]
    save_steps: int | None

    @classmethod
    def of(cls, config: TrainConfig, batches: int, evaluates: bool) -> TrainingSchedule:
        per_epoch = max(1, math.ceil(batches / config.gradient_accumulation))
        steps = max(1, math.ceil(config.epochs * per_epoch))
        interval = per_epoch / min(config.evaluations, per_epoch)
        points = {round(interval * number) for number in range(1, math.ceil(steps / interval) + 1)}
        evaluation_steps = {point for point in points if point <= steps} | {steps} if evaluates else ()
        return cls(per_epoch, steps, frozenset(evaluation_steps), config.save_steps)

    def saves(self, step: int) -> bool:
        regular = self.save_steps is not None and step % self.save_steps == 0
        return regular or step in self.evaluation_steps or step % self.steps_per_epoch == 0 or step == self.steps


class ScheduleCallback(TrainerCallback):
    """Makes a Trainer follow a schedule, and stop early where evaluations get no better."""

    def __init__(
        self, schedule: TrainingSchedule, patience: int | None, metric: Metric | None, start: Evaluation | None
    ) -> None:
        self.schedule, self.patience, self.metric, self.start = schedule, patience, metric, start

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step
        if step in self.schedule.evaluation_steps:
            control.should_evaluate = True
        if self.schedule.saves(step):
            # Losses since the last log are not in a checkpoint, so they are logged before it.
            control.should_save = control.should_log = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.patience is None or self.metric is None:
            return
        evaluations = all_evaluations(state.log_history, self.start)
        best = best_evaluation(evaluations, self.metric)
        if sum(evaluation.step > best.step for evaluation in evaluations) >= self.patience:
            control.should_training_stop = True


class LogCallback(TrainerCallback):
    """Passes the log of the Trainer on to an observer: the step, the number of steps, losses and evaluations, the name
    of the metric, and its value `before` training where that is known."""

    def __init__(self, observer: Observer, metric: str, before: float | None) -> None:
        self.observer, self.metric, self.before = observer, metric, before

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero:
            steps = {"step": state.global_step, "steps": state.max_steps}
            before = {} if self.before is None else {"before": self.before}
            self.observer.log({**(logs or {}), **steps, "metric": self.metric, **before})
