"""Runs with the same budget against each other: the models they end with, and which differ by more than noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headprune.measure.compare_curves import (
    Curve,
    difference,
    difference_json,
    extremes,
    interval_json,
    interval_where,
    mean_known,
    mean_metric,
    why_unpaired,
)
from headprune.measure.curves import signed, signed_per_sample
from headprune.measure.intervals import Difference, Interval
from headprune.measure.metrics import Metric
from headprune.measure.trajectory import Step, finite_or_none

MEASURES = ("parameters", "flops", "latency")  # of which every row has the share that is left


def share_left(first: Step, step: Step, measure: str) -> float | None:
    """What a step leaves of the dense model in the measure of a budget; None where that was not measured."""
    if measure == "latency":
        return step.latency if step.step else None
    if measure == "flops":
        return step.model_flops / first.model_flops if step.model_flops and first.model_flops else None
    return step.parameters / first.parameters if first.parameters else None


@dataclass(frozen=True)
class Lead:
    """How far a model is ahead of that of another row, paired over samples; in units of the metric, for perplexity of
    its logarithm. None where the two cannot be paired, and `unpaired` says why."""

    of: str
    metric: Difference | None
    unpaired: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"of": self.of, "metric": difference_json(self.metric), "unpaired": self.unpaired}


@dataclass(frozen=True)
class AtBudget:
    """One row of the table: the model that a criterion ends with, or the mean over the trials of random."""

    name: str
    runs: list[str]
    measured: Metric
    metric: float | None
    interval: Interval | None  # of the metric, 95 %
    agreement: float | None
    units: dict[str, float]  # kind -> members left
    shares: dict[str, float | None]  # of the dense model's parameters, FLOPs and time that are left
    spread: Interval | None  # lowest and highest metric of several runs
    schedule: str = ""
    ahead: list[Lead] = field(default_factory=list)  # the best row: of every other; others: of the next

    @property
    def merit(self) -> float:
        """Larger = better."""
        return -math.inf if self.metric is None or math.isnan(self.metric) else signed(self.measured, self.metric)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "runs": self.runs,
            "schedule": self.schedule,
            "measured": self.measured.name,
            "metric": None if self.metric is None else finite_or_none(self.metric),
            "interval": interval_json(self.interval),
            "agreement": self.agreement,
            "units": self.units,
            "shares": self.shares,
            "spread": interval_json(self.spread),
            "ahead": [lead.to_json() for lead in self.ahead],
        }


def rank_at_budget(curves: Sequence[Curve]) -> list[AtBudget]:
    """A row per criterion, best first by the metric of the model at the last step; in the given order where metrics
    differ. The runs end where their budget is met."""
    rows = [(_row(curve), curve) for curve in curves]
    if len({curve.metric.name for curve in curves}) > 1:
        return [row for row, _ in rows]
    rows.sort(key=lambda pair: pair[0].merit, reverse=True)
    for rank, (row, curve) in enumerate(rows[:-1]):
        others = rows[1:] if rank == 0 else rows[rank + 1 : rank + 2]
        row.ahead.extend(_lead(curve, other) for _, other in others)
    return [row for row, _ in rows]


def _row(curve: Curve) -> AtBudget:
    ends = [steps[-1] for steps in curve.trials]
    values: list[float | None] = [step.metric for step in ends]
    return AtBudget(
        name=curve.name,
        runs=list(curve.runs),
        schedule=curve.schedule,
        measured=curve.metric,
        metric=mean_metric(curve.metric, values),
        interval=interval_where(curve, _end),
        agreement=mean_known([step.agreement for step in ends]),
        units=_mean_units([step.units for step in ends]),
        shares={
            measure: mean_known([share_left(steps[0], steps[-1], measure) for steps in curve.trials])
            for measure in MEASURES
        },
        spread=extremes(values),
    )


def _end(steps: Sequence[Step]) -> Step:
    return steps[-1]


def _mean_units(counts: Sequence[Mapping[str, int]]) -> dict[str, float]:
    return {kind: statistics.fmean(count.get(kind, 0) for count in counts) for kind in counts[0]}


def _lead(one: Curve, other: Curve) -> Lead:
    lead = difference(one, other, lambda steps: signed_per_sample(one.metric, steps[-1]))
    return Lead(other.name, lead, None if lead is not None else why_unpaired(one, other))
