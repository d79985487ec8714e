"""Numbers that sum up a curve: the metric of a trajectory over the share of heads removed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from headprune.measure.metrics import Metric
from headprune.measure.trajectory import Step

SHARES = (0.25, 0.5, 0.75)  # of heads removed, at which curves are compared
DROPS = (0.01, 0.05)  # of the metric, within which removable heads are counted


def area(steps: Sequence[Step]) -> float:
    """Area under the curve of the metric over the share of heads removed, by trapezoids; NaN for a single step."""
    total = steps[0].heads - steps[-1].heads
    if not total:
        return math.nan
    return sum((a.heads - b.heads) * (a.metric + b.metric) / 2 for a, b in itertools.pairwise(steps)) / total


def signed_area(metric: Metric, steps: Sequence[Step]) -> float:
    """Area under the curve, larger = better: for perplexity the area of its negative logarithm."""
    if metric.higher_is_better:
        return area(steps)
    return area([replace(step, metric=-math.log(step.metric)) for step in steps])


def at_share(steps: Sequence[Step], share: float) -> Step | None:
    """The first step at which at least this share of the heads is gone; None for a run that did not go that far."""
    wanted = math.ceil(share * steps[0].heads - 1e-9)
    return next((step for step in steps if steps[0].heads - step.heads >= wanted), None)


def removable(metric: Metric, steps: Sequence[Step], drop: float) -> int:
    """How many heads can go before the metric is worse than dense by more than `drop`."""
    gone = 0
    for step in steps:
        if not metric.drop(steps[0].metric, step.metric) <= drop + 1e-12:  # NaN is worse than any drop
            break
        gone = steps[0].heads - step.heads
    return gone


def weighted_area(metric: Metric, steps: Sequence[Step]) -> float:
    weights = [step.heads / steps[0].heads for step in steps]
    values = [step.metric if metric.higher_is_better else -math.log(step.metric) for step in steps]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
