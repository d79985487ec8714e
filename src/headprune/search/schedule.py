"""From scores to the next removals, and the rules that say when to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headprune.errors import ScheduleError
from headprune.measure.metrics import Metric
from headprune.units import AttentionSite
from headprune.units.members import Head

KINDS = ("greedy", "one-shot")


@dataclass(frozen=True)
class Schedule:
    """`greedy` scores again after every removal, `one-shot` scores once; `every` units go per step."""

    kind: str = "greedy"
    every: int = 1
    min_per_site: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ScheduleError(f"There is no schedule {self.kind!r}; choose one of {', '.join(KINDS)}.")
        if self.every < 1:
            raise ScheduleError(f"At least one unit must go per step, but every is {self.every}.")
        if self.min_per_site < 0:
            raise ScheduleError(f"min_per_site must not be negative, but it is {self.min_per_site}.")

    def choose(self, scores: torch.Tensor, sites: Sequence[AttentionSite], most: int | None = None) -> list[Head]:
        """The heads of the next units to go, least important first; none if no unit may go.

        A unit's score is the mean of its heads'. Equal scores go in order of site and head. `most` limits the number
        of heads, so that a budget is not overshot; a first unit that is larger goes all the same.
        """
        left = {site.index: site.heads for site in sites}
        ranked = sorted(
            (float(scores[site.index, [head.index for head in unit]].double().mean()), unit)
            for site in sites
            if not site.obstacle
            for unit in site.units()
        )
        chosen: list[Head] = []
        units = 0
        for _, unit in ranked:
            site = unit[0].site
            if units == self.every or (most is not None and chosen and len(chosen) + len(unit) > most):
                break
            if left[site] - len(unit) >= self.min_per_site:
                left[site] -= len(unit)
                chosen += unit
                units += 1
        return chosen


@dataclass(frozen=True)
class Stop:
    """Which step of a trajectory is the result: at most one rule; none means the last step."""

    keep: float | int | None = None
    max_drop: float | None = None
    knee: bool = False

    def __post_init__(self) -> None:
        if sum((self.keep is not None, self.max_drop is not None, self.knee)) > 1:
            raise ScheduleError("Choose one of keep, max_drop and knee; they are different ways to stop.")
        if isinstance(self.keep, float) and not 0 <= self.keep <= 1:
            raise ScheduleError(
                f"keep as a share must be between 0 and 1, but it is {self.keep}; a count is a whole number."
            )
        if isinstance(self.keep, int) and self.keep < 0:
            raise ScheduleError(f"keep as a count must not be negative, but it is {self.keep}.")
        if self.max_drop is not None and not self.max_drop >= 0:
            raise ScheduleError(f"max_drop must not be negative, but it is {self.max_drop}.")

    def heads_left(self, total: int) -> int:
        """The number of heads at which a `keep` rule is met."""
        if self.keep is None:
            return 0
        if isinstance(self.keep, int):
            if self.keep > total:
                raise ScheduleError(f"The model has {total} heads, so {self.keep} cannot be kept.")
            return self.keep
        return math.ceil(self.keep * total - 1e-9)

    def result(self, metric: Metric, values: Sequence[float], heads: Sequence[int]) -> int:
        """The step to take, from the metric and the heads left at each step; step 0 is the dense model."""
        if self.keep is not None:
            target = self.heads_left(heads[0])
            return next((step for step, left in enumerate(heads) if left <= target), len(heads) - 1)
        if self.max_drop is not None:
            for step, value in enumerate(values):
                if not metric.drop(values[0], value) <= self.max_drop + 1e-12:
                    return step - 1
            return len(values) - 1
        return knee(metric, values, heads) if self.knee else len(values) - 1

    def reached(self, metric: Metric, values: Sequence[float], heads: Sequence[int]) -> bool:
        """Whether further steps cannot change the result."""
        if self.keep is not None:
            return heads[-1] <= self.heads_left(heads[0])
        return self.max_drop is not None and self.result(metric, values, heads) < len(values) - 1


def knee(metric: Metric, values: Sequence[float], heads: Sequence[int]) -> int:
    """The inflection point of a curve: the step at which the share of heads removed is farthest ahead of the share of
    the metric lost, both scaled to [0, 1], heads by all that were removed and the metric by its largest drop; of equal
    ones the step with fewer heads. A curve that never falls ends at its last step."""
    drops = [metric.drop(values[0], value) for value in values]
    span, removed = max(drops), heads[0] - heads[-1]
    if not span > 0 or not removed:
        return len(values) - 1
    heights = [(heads[0] - left) / removed - drop / span for left, drop in zip(heads, drops, strict=True)]
    best = max(heights)
    if best <= 1e-12:  # nowhere ahead: every removal costs more than its share
        return 0
    return max(step for step, height in enumerate(heights) if height >= best - 1e-12)
