"""When to stop: rules over a curve that is measured on samples, and so is never exact."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headprune.errors import DataError, ScheduleError
from headprune.measure.curves import rising
from headprune.measure.intervals import Z, paired, standard_error
from headprune.measure.metrics import Metric

log = logging.getLogger(__name__)

THE_END = "the end of the curve"  # the rule where none was reached
Outcomes = Sequence[torch.Tensor | None] | None  # per step, one number per sample


@dataclass(frozen=True)
class Decision:
    """The step to take, and the rule that chose it."""

    step: int
    rule: str


def check_keep(keep: Any) -> float | int | None:
    """A share as a float, a count as an int; numbers of numpy and torch as well."""
    if keep is None:
        return None
    if isinstance(keep, (bool, str)):
        raise ScheduleError(f"keep is a share such as 0.5 or a number of heads such as 36, not {keep!r}.")
    try:
        return operator.index(keep)
    except TypeError:
        pass
    try:
        return float(keep)
    except (TypeError, ValueError):
        raise ScheduleError(f"keep is a share such as 0.5 or a number of heads such as 36, not {keep!r:.60}.") from None


@dataclass(frozen=True)
class Stop:
    """Which step of a trajectory is the result: the first that any rule reaches; without rules the last step."""

    keep: float | int | None = None
    max_drop: float | None = None
    knee: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", check_keep(self.keep))
        if isinstance(self.keep, float) and not 0 <= self.keep <= 1:
            raise ScheduleError(
                f"keep as a share must be between 0 and 1, but it is {self.keep}; a count is a whole number."
            )
        if isinstance(self.keep, int) and self.keep < 0:
            raise ScheduleError(f"keep as a count must not be negative, but it is {self.keep}.")
        if self.max_drop is not None and not self.max_drop >= 0:
            raise ScheduleError(f"max_drop must not be negative, but it is {self.max_drop}.")

    def units_left(self, total: int) -> int:
        """The number of units at which a `keep` rule is met."""
        if self.keep is None:
            return 0
        if isinstance(self.keep, int):
            if self.keep > total:
                raise ScheduleError(f"The model has {total} heads, so {self.keep} cannot be kept.")
            return self.keep
        return math.ceil(self.keep * total - 1e-9)

    def check(self, metric: Metric, dense: float, outcomes: torch.Tensor | None) -> None:
        """Refuse a limit that means nothing, and say where the data is too small for it, before anything is removed."""
        if self.keep == 0:
            log.warning("keep=0 leaves no head at all; the whole attention of the model will go.")
        if self.max_drop is None:
            return
        if math.isnan(dense):
            raise DataError(
                f"The {metric.name} of the dense model is not a number, so max_drop has nothing to compare with; check "
                "the evaluation data, or choose another metric."
            )
        if outcomes is None or len(outcomes) < 2:
            return
        known = Z * standard_error(outcomes)
        if known > self.max_drop > 0:
            wanted = math.ceil(len(outcomes) * (known / self.max_drop) ** 2)
            log.warning(
                "%d samples know the %s to within %.2g only, so a drop of %.2g cannot be told from noise; about %d "
                "samples could.",
                len(outcomes),
                metric.name,
                known,
                self.max_drop,
                wanted,
            )

    def decide(
        self, metric: Metric, values: Sequence[float], left: Sequence[int], outcomes: Outcomes = None
    ) -> Decision:
        """The step to take, from the metric and what is left of the model at each step, in the measure of its budget;
        step 0 is the dense model."""
        last = len(values) - 1
        reached = []
        if self.keep is not None:
            target = self.units_left(left[0])
            reached += [Decision(step, f"keep {self.keep}") for step, count in enumerate(left) if count <= target][:1]
        if self.max_drop is not None and (within := self._within(metric, values, outcomes)) < last:
            reached.append(Decision(within, f"max_drop {self.max_drop:g}"))
        if self.knee:
            reached.append(Decision(knee(metric, values, left), "knee"))
        return min(reached, key=lambda decision: decision.step, default=Decision(last, THE_END))

    def reached(self, metric: Metric, values: Sequence[float], left: Sequence[int], outcomes: Outcomes = None) -> bool:
        """Whether further steps cannot change the result."""
        if self.knee:
            return False
        if self.keep is not None and left[-1] <= self.units_left(left[0]):
            return True
        return self.max_drop is not None and self._exceeded(metric, values, outcomes)

    def _exceeded(self, metric: Metric, values: Sequence[float], outcomes: Outcomes) -> bool:
        """Whether a step has fallen too far for certain: the whole interval of its drop is beyond the limit."""
        assert self.max_drop is not None
        for step, value in enumerate(values):
            if metric.drop(values[0], value) <= self.max_drop + 1e-12:
                continue
            if outcomes is None or outcomes[0] is None or (now := outcomes[step]) is None or math.isnan(value):
                return True
            if _least_drop(metric, values[0], outcomes[0], now) > self.max_drop:
                return True
        return False

    def _within(self, metric: Metric, values: Sequence[float], outcomes: Outcomes) -> int:
        """The last step whose drop is within the limit. Where the samples of each step are known, the drops are those
        of the falling curve that fits the measured one best: a dip that later steps do not confirm is noise."""
        assert self.max_drop is not None
        drops = [metric.drop(values[0], value) for value in values]
        finite = next((step for step, drop in enumerate(drops) if math.isnan(drop)), len(drops))
        drops = drops[:finite]
        if outcomes is not None and all(o is not None for o in outcomes[:finite]):
            drops = [0.0, *rising(drops[1:])]
        within = 0
        for step, drop in enumerate(drops):
            if not drop <= self.max_drop + 1e-12:
                break
            within = step
        return within


def _least_drop(metric: Metric, dense: float, before: torch.Tensor, now: torch.Tensor) -> float:
    """The lower end of the 95 % interval of the drop, paired over samples."""
    if len(before) != len(now):
        return math.inf
    gap = paired(before, now)
    if metric.logarithmic:  # a rise of the loss by x is a relative rise of the perplexity by exp(x) - 1
        return math.expm1(-gap.high)
    low = gap.low if metric.higher_is_better else -gap.high
    return low / abs(dense) if metric.relative and dense else low


def knee(metric: Metric, values: Sequence[float], left: Sequence[int]) -> int:
    """The inflection point of a curve: the step at which the share removed of the model is farthest ahead of the share
    of the metric lost, both scaled to [0, 1], the first by all that was removed and the metric by its largest drop; of
    equal ones the step with less left. A curve that never falls ends at its last step."""
    drops = [metric.drop(values[0], value) for value in values]
    span, removed = max(drops), left[0] - left[-1]
    if not span > 0 or not removed:
        return len(values) - 1
    heights = [(left[0] - count) / removed - drop / span for count, drop in zip(left, drops, strict=True)]
    best = max(heights)
    if best <= 1e-12:  # nowhere ahead: every removal costs more than its share
        return 0
    return max(step for step, height in enumerate(heights) if height >= best - 1e-12)
