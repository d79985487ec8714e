"""Numbers that sum up a curve: the metric of a trajectory over the share of heads removed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from headprune.measure.metrics import Metric
from headprune.measure.trajectory import Step

DROPS = (0.01, 0.05)  # of the metric, within which removable heads are counted


def share_text(share: float) -> str:
    return f"{100 * share:g}%"


def shares(steps: Sequence[Step]) -> list[float]:
    """The share of heads removed at each step; where neurons are pruned as well, the share of the FLOPs of both, since
    one head is worth many neurons; of members of any kind where neither is known."""
    by_flops = steps[0].attention is not None and steps[0].flops > 0
    left = [step.flops if by_flops else step.heads if steps[0].heads else step.left for step in steps]
    return [(left[0] - count) / left[0] if left[0] else 0.0 for count in left]


def curve_rows(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """A row of a table per step: what was removed, and what was measured then."""
    kinds = list(steps[0].units)
    timed = any(step.latency is not None for step in steps)  # relative to the dense model, of which none is recorded
    return [
        {
            "step": step.step,
            "removed": share,
            **{kind: step.units.get(kind, 0) for kind in kinds},
            "metric": step.metric,
            "low": None if step.interval is None else step.interval.low,
            "high": None if step.interval is None else step.interval.high,
            "agreement": step.agreement,
            "loss": step.loss,
            "parameters": step.parameters,
            "flops": step.flops,
            **({"latency": step.latency if step.step else 1.0} if timed else {}),
        }
        for step, share in zip(steps, shares(steps), strict=True)
    ]


def weights(steps: Sequence[Step], until: float | None = None) -> list[float]:
    """The weight of each step in the mean of the curve from its start to `until`, a share of heads removed, or to its
    end: trapezoids, the last of them cut where the range ends. All zero where nothing was removed."""
    shares_removed = shares(steps)
    end = shares_removed[-1] if until is None else min(until, shares_removed[-1])
    result = [0.0] * len(steps)
    if not end > 0:
        return result
    for number, (left, right) in enumerate(itertools.pairwise(shares_removed)):
        if not left < end or left == right:
            continue
        width = min(right, end) - left
        part = width / (right - left)
        result[number] += width * (2 - part) / 2 / end
        result[number + 1] += width * part / 2 / end
    return result


def area(steps: Sequence[Step]) -> float:
    """Area under the curve of the metric over the share of heads removed, by trapezoids; NaN for a single step."""
    return _mean(weights(steps), [step.metric for step in steps])


def signed_area(metric: Metric, steps: Sequence[Step], until: float | None = None) -> float:
    """Area under the curve, larger = better: of the negative metric where smaller values are better, for perplexity of
    its negative logarithm."""
    return _mean(weights(steps, until), [signed(metric, step.metric) for step in steps])


def signed(metric: Metric, value: float) -> float:
    """The metric so that larger is better, on the scale on which values average."""
    if metric.logarithmic:
        return -math.log(value) if value > 0 else math.nan
    return value if metric.higher_is_better else -value


def unsigned(metric: Metric, value: float) -> float:
    """The metric from its signed value."""
    if metric.logarithmic:
        return math.exp(-value) if not value < -700 else math.inf
    return value if metric.higher_is_better else -value


def signed_per_sample(metric: Metric, step: Step | None) -> torch.Tensor | None:
    """One number per sample whose mean is the signed metric; None where they are not known."""
    if step is None or step.per_sample is None or not torch.isfinite(step.per_sample).all():
        return None
    return step.per_sample if metric.higher_is_better else -step.per_sample


def area_per_sample(metric: Metric, steps: Sequence[Step], until: float | None = None) -> torch.Tensor | None:
    """One number per sample whose mean is the signed area: the area under the curve of that sample."""
    parts = [
        (weight, signed_per_sample(metric, step))
        for weight, step in zip(weights(steps, until), steps, strict=True)
        if weight
    ]
    weighted_parts = [weight * part for weight, part in parts if part is not None]
    if not weighted_parts or len(weighted_parts) < len(parts) or len({len(part) for part in weighted_parts}) > 1:
        return None
    return torch.stack(weighted_parts).sum(0)


def at_share(steps: Sequence[Step], share: float) -> Step | None:
    """The first step at which at least this share of the heads is removed; None for a run that ended before."""
    shares_removed = shares(steps)
    return next(
        (step for step, share_removed in zip(steps, shares_removed, strict=True) if share_removed >= share - 1e-9), None
    )


def removable(metric: Metric, steps: Sequence[Step], drop: float) -> int:
    """How many heads can be removed before the metric is worse than dense by more than `drop`."""
    return steps[0].heads - steps[_last_within(metric, steps, drop)].heads


def within(metric: Metric, steps: Sequence[Step], drop: float) -> float:
    """The share of heads that can be removed before the metric is worse than dense by more than `drop`."""
    return shares(steps)[_last_within(metric, steps, drop)]


def _last_within(metric: Metric, steps: Sequence[Step], drop: float) -> int:
    """The last step before the first whose metric is too bad."""
    for number, step in enumerate(steps):
        if not metric.drop(steps[0].metric, step.metric) <= drop + 1e-12:  # NaN is worse than any drop
            return max(0, number - 1)
    return len(steps) - 1


def weighted_area(metric: Metric, steps: Sequence[Step]) -> float:
    """The mean of the signed metric in which a step weighs the share of heads that are left."""
    return _mean(
        [1 - share_removed for share_removed in shares(steps)], [signed(metric, step.metric) for step in steps]
    )


def _mean(counts: Sequence[float], values: Sequence[float]) -> float:
    """The weighted mean; a value of weight 0 may be NaN, and without any weight so is the mean."""
    total = sum(counts)
    return sum(w * v for w, v in zip(counts, values, strict=True) if w) / total if total else math.nan


def isotonic(values: Sequence[float]) -> list[float]:
    """Isotonic regression: the non-decreasing sequence nearest to these values in squares."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (first, count), (second, next_count) = blocks[-2:]
            blocks[-2:] = [((first * count + second * next_count) / (count + next_count), count + next_count)]
    return [mean for mean, count in blocks for _ in range(count)]
