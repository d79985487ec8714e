"""Stopping rules, on a curve that is measured on samples and therefore noisy."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headprune.display import counted
from headprune.errors import DataError, ScheduleError
from headprune.measure.curves import isotonic
from headprune.measure.intervals import Z, paired_difference, standard_error
from headprune.measure.metrics import Metric

log = logging.getLogger(__name__)

THE_END = "the end of the curve"  # the rule where none was met
PerSample = Sequence[torch.Tensor | None] | None  # per step, one number per sample


@dataclass(frozen=True)
class Decision:
    """The step of the result, and the rule that chose it."""

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
    """Rules for which step of a trajectory is the result: the first that any rule chooses; without rules the last
    step."""

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
                raise ScheduleError(f"The model has {counted(total, 'head')}, so {self.keep} cannot be kept.")
            return self.keep
        return math.ceil(self.keep * total - 1e-9)

    def check(self, metric: Metric, dense: float, per_sample: torch.Tensor | None) -> None:
        """Refuse a limit that cannot be checked, and warn where the data is too small for it, before anything is
        removed."""
        if self.keep == 0:
            log.warning("keep=0 leaves no head; the whole attention of the model will be removed.")
        if self.max_drop is None:
            return
        if math.isnan(dense):
            raise DataError(
                f"The {metric.name} of the dense model is not a number, so max_drop has nothing to compare with; check "
                "the evaluation data, or choose another metric."
            )
        if per_sample is None or len(per_sample) < 2:
            return
        margin = Z * standard_error(per_sample)
        if margin > self.max_drop > 0:
            samples = math.ceil(len(per_sample) * (margin / self.max_drop) ** 2)
            log.warning(
                "%d samples determine the %s only to within %.2g, so a drop of %.2g cannot be told from noise; use "
                "about %d samples.",
                len(per_sample),
                metric.name,
                margin,
                self.max_drop,
                samples,
            )

    def decide(
        self, metric: Metric, values: Sequence[float], left: Sequence[int], per_sample: PerSample = None
    ) -> Decision:
        """The step of the result, from the metric and what is left of the model at each step, in the measure of its
        budget; step 0 is the dense model."""
        last = len(values) - 1
        reached = []
        if self.keep is not None:
            target = self.units_left(left[0])
            reached += [Decision(step, f"keep {self.keep}") for step, count in enumerate(left) if count <= target][:1]
        if self.max_drop is not None and (within := self._within(metric, values, per_sample)) < last:
            reached.append(Decision(within, f"max_drop {self.max_drop:g}"))
        if self.knee:
            reached.append(Decision(knee(metric, values, left), "knee"))
        return min(reached, key=lambda decision: decision.step, default=Decision(last, THE_END))

    def reached(
        self, metric: Metric, values: Sequence[float], left: Sequence[int], per_sample: PerSample = None
    ) -> bool:
        """Whether further steps cannot change the result."""
        if self.knee:
            return False
        if self.keep is not None and left[-1] <= self.units_left(left[0]):
            return True
        return self.max_drop is not None and self._exceeded(metric, values, per_sample)

    def _exceeded(self, metric: Metric, values: Sequence[float], per_sample: PerSample) -> bool:
        """Whether a step is significantly below the limit: the whole interval of its drop is beyond it."""
        assert self.max_drop is not None
        for step, value in enumerate(values):
            if metric.drop(values[0], value) <= self.max_drop + 1e-12:
                continue
            if per_sample is None or per_sample[0] is None or (now := per_sample[step]) is None or math.isnan(value):
                return True
            if _least_drop(metric, values[0], per_sample[0], now) > self.max_drop:
                return True
        return False

    def _within(self, metric: Metric, values: Sequence[float], per_sample: PerSample) -> int:
        """The last step whose drop is within the limit. Where values per sample are known, the drops are those of the
        isotonic fit of the curve: a dip that later steps do not confirm is noise."""
        assert self.max_drop is not None
        drops = [metric.drop(values[0], value) for value in values]
        finite = next((step for step, drop in enumerate(drops) if math.isnan(drop)), len(drops))
        drops = drops[:finite]
        if per_sample is not None and all(values_of_step is not None for values_of_step in per_sample[:finite]):
            drops = [0.0, *isotonic(drops[1:])]
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
    gap = paired_difference(before, now)
    if metric.logarithmic:  # a rise of the loss by x is a relative rise of the perplexity by exp(x) - 1
        return math.expm1(-gap.high)
    low = gap.low if metric.higher_is_better else -gap.high
    return low / abs(dense) if metric.relative and dense else low


def knee(metric: Metric, values: Sequence[float], left: Sequence[int]) -> int:
    """The knee of a curve: the step at which the share removed of the model is farthest ahead of the share
    of the metric lost, both scaled to [0, 1], the first by all that was removed and the metric by its largest drop; of
    equal ones the step with less left. A curve that never falls ends at its last step."""
    drops = [metric.drop(values[0], value) for value in values]
    span, removed = max(drops), left[0] - left[-1]
    if not span > 0 or not removed:
        return len(values) - 1
    heights = [(left[0] - count) / removed - drop / span for count, drop in zip(left, drops, strict=True)]
    best = max(heights)
    if best <= 1e-12:  # every removal costs more than its share
        return 0
    return max(step for step, height in enumerate(heights) if height >= best - 1e-12)
