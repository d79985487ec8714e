"""What the authors' files say about the claims of arXiv 2602.04491: numbers from their curves and random trials."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headprune.measure.intervals import Z, wilson
from headprune.measure.metrics import METRICS
from headprune.papers.figure_data import CRITERIA, Curve, Panel
from headprune.papers.paper_models import MODELS, PaperModel, ReproductionError
from headprune.papers.published import mask_of_order, published_panels, read_entropies, read_masks, read_orders
from headprune.papers.ranks import spearman
from headprune.search.stop import knee

# Rows that the curves were measured on; BERT's and ALBERT's are the whole split of their protocol.
ROWS = {"bert": 2329, "albert": 9815, "roberta": 1000, "xlm-roberta": 3000}
DRAWS, SEED = 10_000, 0  # of the bootstrap over trials
SHARES = (0.3, 0.7)  # of the heads removed


def authors_findings(folder: Path) -> dict[str, Any]:
    """Every finding by model key. Intervals are of 95 %; `settings` says how they were drawn."""
    orders, entropies, masks = read_orders(folder), read_entropies(folder), read_masks(folder)
    by_model: dict[str, Any] = {}
    for model, panel in zip(MODELS, published_panels(folder), strict=True):
        rows = ROWS[model.key]
        if 0 not in dict(panel.curves["gnorm"]):
            raise ReproductionError(
                f"The curve of {model.title} does not begin at 0 heads; give the authors' own file."
            )
        by_model[model.key] = {
            "table_1": table_1_on_the_curve(model, panel),
            "stop": stops(model, panel),
            "areas": areas(panel),
            "against_random": against_random(panel),
            "against_entropy": against(panel, "entropy"),
            "against_inverse_entropy": against(panel, "inverse:entropy"),
            "pruned": [accuracy_at(panel, share, rows) for share in SHARES],
        }
        if orders is not None and entropies is not None:
            by_model[model.key]["order"] = order_and_entropy(orders[model.key], entropies[model.key])
        if orders is not None and masks is not None:
            of_order = mask_of_order(model, orders[model.key])
            by_model[model.key]["mask"] = {
                "kept": sum(map(sum, masks[model.key])),
                "equal": of_order == masks[model.key],
            }
    return {"settings": {"draws": DRAWS, "seed": SEED, "shares": SHARES, "rows": ROWS}, "models": by_model}


def table_1_on_the_curve(model: PaperModel, panel: Panel) -> dict[str, Any]:
    """The accuracies of table 1 and those of the curve at these numbers of heads, in per cent; None where the curve
    ends before."""
    curve = dict(panel.curves["gnorm"])
    values = [curve.get(count * model.applications) for count in (0, model.removed)]
    on_curve = [None if value is None else round(100 * value, 2) for value in values]
    return {"published": list(model.accuracy), "curve": on_curve, "equal": on_curve == list(model.accuracy)}


def stops(model: PaperModel, panel: Panel) -> dict[str, Any]:
    """Heads removed where the paper stops and where `--knee` does, counted as in the curve, and accuracies there."""
    curve = panel.curves["gnorm"]
    removed, values = [count for count, _ in curve], [value for _, value in curve]
    place = knee(METRICS["accuracy"], values, [panel.heads - count for count in removed])
    published = model.removed * model.applications
    return {
        "published": published,
        "knee": removed[place],
        "accuracy_published": dict(curve).get(published),
        "accuracy_knee": values[place],
    }


def area(curve: Curve) -> float:
    """Mean accuracy over the heads removed, by trapezoids: 1 for a model that is always right. NaN for one point."""
    span = curve[-1][0] - curve[0][0]
    parts = ((right - left) * (one + other) / 2 for (left, one), (right, other) in itertools.pairwise(curve))
    return sum(parts) / span if span else math.nan


def areas(panel: Panel) -> dict[str, Any]:
    """The area under every curve, and of the random trials the mean, the standard deviation and the 2.5 and 97.5 %
    quantiles."""
    result: dict[str, Any] = {name: area(panel.curves[name]) for name in CRITERIA if name in panel.curves}
    trials = _trial_areas(panel, _counts(panel))
    low, high = np.quantile(trials, [0.025, 0.975])
    result["random"] = {
        "mean": float(trials.mean()),
        "deviation": float(trials.std(ddof=1)) if len(trials) > 1 else None,
        "range_of_95_percent": [float(low), float(high)],
        "trials": len(trials),
    }
    return result


def against_random(panel: Panel, *, draws: int = DRAWS, seed: int = SEED) -> dict[str, Any]:
    """Greedy-Gnorm against the random trials, at the numbers of heads that both have; not where none or all are
    removed, where all curves are equal.

    `above` counts points above the median of the trials, with an interval by drawing trials again with replacement.
    The points of a curve depend on one another, so they cannot be counted as independent. `p_area` exchanges whole
    curves instead: the share of the curves, Greedy-Gnorm's own included, whose area is at least its area. If its order
    were one at random, a value of p or less would have the probability p.
    """
    curve = dict(panel.curves["gnorm"])
    every = _counts(panel)
    counts = [count for count in every if 0 < count < panel.heads]
    gnorm = np.array([curve[count] for count in counts])
    trials = _trial_matrix(panel, counts)
    median = np.median(trials, axis=0)
    chance = np.random.default_rng(seed)
    drawn = [
        int((gnorm > np.median(trials[chance.integers(len(trials), size=len(trials))], axis=0)).sum())
        for _ in range(draws)
    ]
    own = area([(count, curve[count]) for count in every])
    better = int((_trial_areas(panel, every) >= own).sum())
    return {
        "points": len(counts),
        "above": int((gnorm > median).sum()),
        "equal": int((gnorm == median).sum()),
        "below": int((gnorm < median).sum()),
        "above_interval": [int(value) for value in np.quantile(drawn, [0.025, 0.975])],
        "below_at": [count for count, low in zip(counts, gnorm < median, strict=True) if low],
        "best_trial_below": int((gnorm > trials.max(axis=0)).sum()),
        "area": own,
        "trials_with_at_least_its_area": better,
        "p_area": (1 + better) / (1 + len(trials)),
    }


def against(panel: Panel, other: str) -> dict[str, Any]:
    """Greedy-Gnorm against another curve, at the numbers of heads that both have, without the two ends."""
    one, two = dict(panel.curves["gnorm"]), dict(panel.curves[other])
    counts = [count for count in sorted(set(one) & set(two)) if 0 < count < panel.heads]
    gaps = np.array([one[count] - two[count] for count in counts])
    return {
        "points": len(counts),
        "above": int((gaps > 0).sum()),
        "equal": int((gaps == 0).sum()),
        "below": int((gaps < 0).sum()),
        "area_difference": area(panel.curves["gnorm"]) - area(panel.curves[other]),
    }


def accuracy_at(panel: Panel, share: float, rows: int) -> dict[str, Any]:
    """Greedy-Gnorm's accuracy with this share of the heads removed (the largest measured number within it), the lowest
    on the way there, and the change from the dense model. Both were measured on the same rows, but outcomes per row
    were not published: the interval is that of independent samples, which is too wide rather than too narrow."""
    curve = dict(panel.curves["gnorm"])
    removed = max(count for count in curve if count <= share * panel.heads)
    dense, pruned = curve[0], curve[removed]
    change = pruned - dense
    lowest = min((count for count in curve if count <= removed), key=lambda count: curve[count])
    margin = Z * math.sqrt((dense * (1 - dense) + pruned * (1 - pruned)) / rows)
    return {
        "removed": removed,
        "share": removed / panel.heads,
        "dense": dense,
        "pruned": pruned,
        "lowest_before": {"removed": lowest, "accuracy": curve[lowest]},
        "pruned_interval": list(wilson(pruned * rows, rows)),
        "change": change,
        "change_interval": [change - margin, change + margin],
    }


def order_and_entropy(order: Sequence[tuple[int, int]], entropy: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Rank correlation of the time at which Greedy-Gnorm removes a head and the entropy of its attention: -1 if it
    removed the highest entropy first. Of a site that is used in several layers the mean entropy counts."""
    table = np.array(entropy)
    if len({site for site, _ in order}) == 1:
        table = table.mean(axis=0, keepdims=True)
    heads = [*order, *sorted({(s, h) for s in range(len(table)) for h in range(table.shape[1])} - set(order))]
    return {
        "heads": len(heads),
        "spearman": spearman(list(range(len(heads))), [float(table[site, head]) for site, head in heads]),
    }


def _counts(panel: Panel) -> list[int]:
    """The numbers of heads removed at which there are Greedy-Gnorm and all trials."""
    fullest = max((len(values) for values in panel.trials.values()), default=0)
    common = sorted(set(dict(panel.curves["gnorm"])) & set(panel.trials))
    counts = [count for count in common if len(panel.trials[count]) == fullest]
    if len(counts) < 2 or not any(0 < count < panel.heads for count in counts):
        raise ReproductionError(
            f"The curve and the random trials of {panel.title} have no numbers of heads in common; give the authors' "
            "own files."
        )
    return counts


def _trial_matrix(panel: Panel, counts: Sequence[int]) -> npt.NDArray[np.float64]:
    """[trials x counts]: a trial is one column of the authors' sheet."""
    return np.array([panel.trials[count] for count in counts]).T


def _trial_areas(panel: Panel, counts: Sequence[int]) -> npt.NDArray[np.float64]:
    return np.array([area(list(zip(counts, trial, strict=True))) for trial in _trial_matrix(panel, counts)])


def stops_table(findings: Mapping[str, Any]) -> str:
    """Where the paper and `--knee` stop, as markdown."""
    lines = ["| model | heads in the curve | the paper stops at | accuracy | `--knee` stops at | accuracy |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for model in MODELS:
        stop = findings["models"][model.key]["stop"]
        lines.append(
            f"| {model.title} | {model.heads * model.applications} | {stop['published']} | "
            f"{stop['accuracy_published']:.4f} | {stop['knee']} | {stop['accuracy_knee']:.4f} |"
        )
    return "\n".join(lines)


def areas_table(findings: Mapping[str, Any]) -> str:
    """The areas under all curves, and Greedy-Gnorm against the random trials, as markdown."""
    names = "Greedy-Gnorm | inverse Greedy-Gnorm | AE | inverse AE"
    lines = [
        f"| model | area: {names} | random: mean, middle 95 % | points above the random median | "
        "trials with at least its area |",
        "|---" + "|---:" * 7 + "|",
    ]
    for model in MODELS:
        found = findings["models"][model.key]
        under, chance = found["areas"], found["against_random"]
        low, high = under["random"]["range_of_95_percent"]
        cells = [
            *(f"{under[name]:.3f}" for name in CRITERIA),
            f"{under['random']['mean']:.3f}, {low:.3f} to {high:.3f}",
            f"{chance['above']} of {chance['points']} ({chance['above_interval'][0]} to {chance['above_interval'][1]})",
            f"{chance['trials_with_at_least_its_area']} of {under['random']['trials']}",
        ]
        lines.append(f"| {model.title} | {' | '.join(cells)} |")
    return "\n".join(lines)
