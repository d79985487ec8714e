"""Curves against each other: which is better where models are of use, by how much, and whether that is more than noise.

Curves of runs on the same samples are compared sample by sample: what is hard for one model is hard for the other, so
the difference is known far better than either value.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headprune.defaults import COMPARED_AT
from headprune.measure.curves import (
    DROPS,
    area_per_sample,
    at_share,
    removable,
    share_text,
    shares,
    signed,
    signed_area,
    signed_per_sample,
    unsigned,
    within,
)
from headprune.measure.intervals import Difference, Interval, interval, paired_difference
from headprune.measure.metrics import Metric
from headprune.measure.trajectory import Step, finite_or_none

USABLE = 0.10  # the largest drop of the metric in the usable range
OTHER_SAMPLES = "they were evaluated on different samples"
NO_PER_SAMPLE = "their values per sample are not known"
PerSample = Callable[[Sequence[Step]], torch.Tensor | None]  # of one run, for a step or a range of it
StepChoice = Callable[[Sequence[Step]], Step | None]  # a step of one run; None where it ended before


@dataclass(frozen=True)
class Curve:
    """The runs of one criterion, several of them for random."""

    name: str
    runs: Sequence[str]
    metric: Metric
    trials: Sequence[Sequence[Step]]  # the steps of each run
    samples: Hashable = None  # equal where runs were evaluated on the same samples
    schedule: str = ""

    def per_sample(self, of: PerSample) -> torch.Tensor | None:
        """Per sample, the mean over the runs."""
        parts = [part for part in map(of, self.trials) if part is not None]
        if len(parts) < len(self.trials) or len({len(part) for part in parts}) > 1:
            return None
        return torch.stack(parts).mean(0)


@dataclass(frozen=True)
class Ahead:
    """How far a row is ahead of another one, paired over samples; below 0 it is behind. In units of the metric, for
    perplexity of its logarithm; None where the two cannot be paired, and `unpaired` says why."""

    of: str
    usable_area: Difference | None
    area: Difference | None
    metric: dict[str, Difference | None]  # share removed -> difference there
    unpaired: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "of": self.of,
            "usable_area": difference_json(self.usable_area),
            "area": difference_json(self.area),
            "metric": {share: difference_json(gap) for share, gap in self.metric.items()},
            "unpaired": self.unpaired,
        }


@dataclass(frozen=True)
class Comparison:
    """One row of the table: a criterion, or the mean over the trials of random."""

    name: str
    runs: list[str]
    measured: Metric
    area: float  # of the whole curve
    usable_area: float  # of the usable range, by which rows are ranked
    usable_until: float  # the share of heads removed at which that range ends; the same for all rows
    metric: dict[str, float | None]  # share removed -> metric; None where a run did not go that far
    interval: dict[str, Interval | None]  # of the metric, 95 %
    agreement: dict[str, float | None]
    removable: dict[str, int]  # allowed drop -> heads that can be removed before the metric has fallen that far
    spread: dict[str, Interval | None]  # share removed -> lowest and highest of several runs
    spread_area: Interval | None  # the same of the usable area
    schedule: str = ""
    ahead: list[Ahead] = field(default_factory=list)  # the best row: of every other; others: of the next

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "runs": self.runs,
            "schedule": self.schedule,
            "measured": self.measured.name,
            "area": finite_or_none(self.area),
            "usable_area": finite_or_none(self.usable_area),
            "usable_until": self.usable_until,
            "metric": {share: finite_or_none(value) for share, value in self.metric.items()},
            "interval": {share: interval_json(value) for share, value in self.interval.items()},
            "agreement": self.agreement,
            "removable": self.removable,
            "spread": {share: interval_json(value) for share, value in self.spread.items()},
            "spread_area": interval_json(self.spread_area),
            "ahead": [ahead.to_json() for ahead in self.ahead],
        }


def comparable(curves: Sequence[Curve]) -> bool:
    """Whether the curves can be ranked: they have one metric, and one range that all of them cover."""
    reaches = {round(shares(steps)[-1], 6) for curve in curves for steps in curve.trials}
    return len({curve.metric.name for curve in curves}) == 1 and (usable_until(curves) > 0 or len(reaches) == 1)


def usable_until(curves: Sequence[Curve]) -> float:
    """The share of heads removed at which the usable range ends: as far as any of the runs stays within the drop USABLE
    of its dense model, and all of them go. 0 where none can lose a head."""
    if not curves:
        return 0.0
    useful = max(within(curve.metric, steps, USABLE) for curve in curves for steps in curve.trials)
    return min(useful, *(shares(steps)[-1] for curve in curves for steps in curve.trials))


def rank_curves(curves: Sequence[Curve], at: Sequence[float] = COMPARED_AT) -> list[Comparison]:
    """A row per curve, best first by the usable area, or by the whole one where there is no usable range; in the given
    order where they cannot be compared. Rows have the metric at the shares `at` of the heads removed."""
    until = usable_until(curves)
    rows = [(_row(curve, until, at), curve) for curve in curves]
    if not comparable(curves):
        return [row for row, _ in rows]
    rows.sort(key=lambda pair: tuple(-math.inf if math.isnan(v) else v for v in _merit(pair[0])), reverse=True)
    for rank, (row, curve) in enumerate(rows[:-1]):
        others = rows[1:] if rank == 0 else rows[rank + 1 : rank + 2]
        row.ahead.extend(_ahead(curve, other, until, at) for _, other in others)
    return [row for row, _ in rows]


def _merit(row: Comparison) -> tuple[float, float]:
    return row.usable_area, row.area


def _row(curve: Curve, until: float, at: Sequence[float]) -> Comparison:
    metric, trials = curve.metric, curve.trials
    points = {share_text(share): [at_share(steps, share) for steps in trials] for share in at}
    values = {share: [None if step is None else step.metric for step in steps] for share, steps in points.items()}
    usable = [signed_area(metric, steps, until or None) for steps in trials]
    return Comparison(
        name=curve.name,
        runs=list(curve.runs),
        schedule=curve.schedule,
        measured=metric,
        area=statistics.fmean(signed_area(metric, steps) for steps in trials),
        usable_area=statistics.fmean(usable),
        usable_until=until,
        metric={share: mean_metric(metric, numbers) for share, numbers in values.items()},
        interval={
            share_text(share): interval_where(curve, lambda steps, share=share: at_share(steps, share))  # type: ignore[misc]
            for share in at
        },
        agreement={
            share: mean_known([None if step is None else step.agreement for step in steps])
            for share, steps in points.items()
        },
        removable={
            f"{drop:.0%}": round(statistics.fmean(removable(metric, steps, drop) for steps in trials)) for drop in DROPS
        },
        spread={share: extremes(numbers) for share, numbers in values.items()},
        spread_area=extremes(usable),
    )


def _ahead(one: Curve, other: Curve, until: float, at: Sequence[float]) -> Ahead:
    metric = one.metric

    def gap(of: PerSample) -> Difference | None:
        return difference(one, other, of)

    ahead = Ahead(
        of=other.name,
        usable_area=gap(lambda steps: area_per_sample(metric, steps, until or None)),
        area=gap(lambda steps: area_per_sample(metric, steps)) if _same_reach(one, other) else None,
        metric={
            share_text(share): gap(lambda steps, share=share: signed_per_sample(metric, at_share(steps, share)))  # type: ignore[misc]
            for share in at
        },
    )
    if ahead.usable_area is not None:
        return ahead
    return Ahead(ahead.of, None, ahead.area, ahead.metric, why_unpaired(one, other))


def difference(one: Curve, other: Curve, of: PerSample) -> Difference | None:
    """How far one is ahead of the other, sample by sample; None where they cannot be paired."""
    mine, theirs = one.per_sample(of), other.per_sample(of)
    if one.samples != other.samples or mine is None or theirs is None or len(mine) != len(theirs):
        return None
    return paired_difference(mine, theirs)


def why_unpaired(one: Curve, other: Curve) -> str:
    first = [curve.per_sample(lambda steps: steps[0].per_sample) for curve in (one, other)]
    numbers = [part for part in first if part is not None]
    different = one.samples != other.samples or (len(numbers) == 2 and len(numbers[0]) != len(numbers[1]))
    return OTHER_SAMPLES if different else NO_PER_SAMPLE


def _same_reach(one: Curve, other: Curve) -> bool:
    return len({round(shares(steps)[-1], 6) for curve in (one, other) for steps in curve.trials}) == 1


def interval_where(curve: Curve, choose: StepChoice) -> Interval | None:
    """The interval of the metric at a step of the runs: that of the run, or of the mean over several runs."""
    steps = [choose(steps) for steps in curve.trials]
    if len(steps) == 1:
        result = None if steps[0] is None else steps[0].interval
    else:
        per_sample = curve.per_sample(lambda trial: signed_per_sample(curve.metric, choose(trial)))
        ends = [] if per_sample is None else sorted(unsigned(curve.metric, end) for end in interval(per_sample))
        result = Interval(*ends) if ends else None
    return result if result is not None and all(map(math.isfinite, result)) else None


def mean_metric(metric: Metric, values: Sequence[float | None]) -> float | None:
    """On the scale on which values average: the geometric mean for perplexity."""
    if len(values) == 1:
        return values[0]
    mean = mean_known([None if value is None else signed(metric, value) for value in values])
    return None if mean is None else unsigned(metric, mean)


def mean_known(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if len(numbers) == len(values) else None


def extremes(values: Sequence[float | None]) -> Interval | None:
    """Lowest and highest of several values, where all of them are numbers."""
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    return Interval(min(numbers), max(numbers)) if len(numbers) == len(values) > 1 else None


def interval_json(value: Interval | None) -> list[float | None] | None:
    return None if value is None else list(map(finite_or_none, value))


def difference_json(gap: Difference | None) -> dict[str, Any] | None:
    if gap is None:
        return None
    return {
        "value": finite_or_none(gap.value),
        "low": finite_or_none(gap.low),
        "high": finite_or_none(gap.high),
        "real": gap.real,
    }
