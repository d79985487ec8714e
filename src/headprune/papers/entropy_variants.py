"""Do the epsilons in attention entropy keep the order of heads? Bounds in closed form, and what real attention gives.

Of a row a of n probabilities, A = -sum a log a, B = -sum a log(a + e) and C = -sum (a + e) log(a + e). Then

    B - A = -sum a log(1 + e / a)           lies in [-log(1 + n e), 0]
    C - B = -e sum log(a + e)               lies in [n e log(n / (1 + n e)), e ((n - 1) log(1 / e) - log(1 + e))]

The first because the logarithm is concave and the a sum to 1 (Jensen), the second because -log(a + e) is convex in a:
least where all a are equal, largest where one of them is 1. Two heads whose A differ by more than the width of the
bound keep their order.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from headprune.papers.ranks import inversions, kendall, spearman
from headprune.signals.entropy import row_entropies

EPSILONS = (1e-5, 1e-7, 1e-9, 1e-12)  # 1e-7 is the authors'
VARIANTS = ("B", "C")
SLACK = 1e-12  # of sums in float64


class Bound(NamedTuple):
    """What a variant adds to variant A of the same row, at least and at most."""

    low: float
    high: float


def bound(variant: str, keys: int, epsilon: float) -> Bound:
    """B - A or C - A of a row over this number of keys."""
    low, high = -math.log1p(keys * epsilon), 0.0
    if variant == "C":
        low += keys * epsilon * math.log(keys / (1 + keys * epsilon))
        high += epsilon * ((keys - 1) * math.log(1 / epsilon) - math.log1p(epsilon))
    return Bound(low, high)


def attention_rows(model: PreTrainedModel, batches: Sequence[Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    """The attention of every sample without padding: [sites, heads, tokens, tokens], of an encoder."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        for batch in batches:
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            maps = torch.stack(eager.base_model(**inputs, output_attentions=True).attentions)
            for place, count in enumerate(batch["attention_mask"].sum(-1).tolist()):
                yield maps[:, place, :, :count, :count]


def bounds_hold(model: PreTrainedModel, batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every row of real attention, in float64, against the bounds: the number of rows, of those outside, and the least
    and the largest place between the bounds, 0 at the lower one and 1 at the upper one."""
    found: dict[str, Any] = {}
    for maps in attention_rows(copy.deepcopy(model).double(), batches):
        valid = torch.ones_like(maps, dtype=torch.bool)
        plain = row_entropies(maps, valid, "A", 0.0)
        for variant, epsilon in itertools.product(VARIANTS, EPSILONS):
            limit = bound(variant, maps.shape[-1], epsilon)
            gaps = row_entropies(maps, valid, variant, epsilon) - plain
            places = (gaps - limit.low) / (limit.high - limit.low)
            entry = found.setdefault(f"{variant}, {epsilon:g}", {"rows": 0, "outside": 0, "places": [1.0, 0.0]})
            entry["rows"] += gaps.numel()
            entry["outside"] += int(((gaps < limit.low - SLACK) | (gaps > limit.high + SLACK)).sum())
            least, most = entry["places"]
            entry["places"] = [min(least, float(places.min())), max(most, float(places.max()))]
    return found


def underflow(model: PreTrainedModel, batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Probabilities of real attention that are exactly 0, where a plain a * log(a) is NaN, by precision."""
    counts: dict[str, Any] = {"probabilities": 0, "float32": 0, "float16": 0, "bfloat16": 0, "not_finite_in_float32": 0}
    for maps in attention_rows(model, batches):
        counts["probabilities"] += maps.numel()
        for name in ("float32", "float16", "bfloat16"):
            counts[name] += int((maps.to(getattr(torch, name)) == 0).sum())
        counts["not_finite_in_float32"] += int((~(maps * maps.log()).isfinite()).sum())
    return counts


def order_kept(plain: Sequence[float], others: Mapping[str, Sequence[float]], keys: Sequence[int]) -> dict[str, Any]:
    """How far the entropies of heads by other variants, named such as "C, 1e-07", have the order of variant A.

    `keys` are the tokens of the samples: the bound of a mean over samples is the mean of their bounds.
    """
    pairs = list(itertools.combinations(plain, 2))
    result: dict[str, Any] = {}
    for name, values in others.items():
        variant, epsilon = name.split(", ")
        limits = [bound(variant, count, float(epsilon)) for count in keys]
        width = sum(limit.high - limit.low for limit in limits) / len(limits)
        result[name] = {
            "spearman": spearman(plain, values),
            "kendall": kendall(plain, values),
            "inversions": inversions(plain, values),
            "pairs": len(pairs),
            "largest_difference": max(abs(one - other) for one, other in zip(plain, values, strict=True)),
            "width_of_bound": width,
            "pairs_kept_by_the_bound": sum(abs(one - other) > width for one, other in pairs),
        }
    return result
