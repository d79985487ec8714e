"""Results of the experiments on Greedy-Gnorm (gnorm_study.py) as markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Results = Sequence[Mapping[str, Any]]  # of several subjects


def comparisons_table(results: Results) -> str:
    """Differences of the area under the accuracy, with their intervals and by seed; a dash where one of the two curves
    was not measured."""
    claims = dict.fromkeys(claim for found in results for claim in found["comparisons"])
    rows = [[claim, *(_difference(found["comparisons"].get(claim)) for found in results)] for claim in claims]
    return _table(["difference of areas", *(found["subject"] for found in results)], rows)


def _difference(gap: Mapping[str, Any] | None) -> str:
    if gap is None:
        return "-"
    low, high = gap["interval"]
    by_seed = ", ".join(f"{value:+.3f}" for value in gap["by_seed"])
    return f"{gap['difference']:+.3f} ({low:+.3f} to {high:+.3f}); {by_seed}"


def accuracy_table(results: Results) -> str:
    """Accuracy along the curves, the mean over the seeds."""
    rows = [
        [f"{found['subject']}: {name}", *(f"{value:.3f}" for value in curve["accuracy"]), f"{curve['area']:.3f}"]
        for found in results
        for name, curve in found["curves"].items()
    ]
    points = results[0]["points"]
    shares = [f"{100 * place // points} % removed" for place in range(points + 1)]
    return _table(["model: order", *shares, "area"], rows)


def ranks_table(results: Results) -> str:
    """The other forms of Gnorm against its default, on the dense model: ranges over the seeds."""
    rows = []
    for name in results[0]["rank_agreement"][0]:
        for found in results:
            entries = [seed[name] for seed in found["rank_agreement"]]
            rows.append(
                [
                    f"{found['subject']}: `{name}`",
                    _range([one["spearman"] for one in entries], ".2f"),
                    _range([one["kendall"] for one in entries], ".2f"),
                    f"{_range([one['inversions'] for one in entries], 'd')} of {entries[0]['pairs']:,}",
                ]
            )
    return _table(["model: against `gnorm`", "Spearman", "Kendall", "pairs in the other order"], rows)


def entropy_table(results: Results) -> str:
    """Variants and epsilons of attention entropy against variant A: the worst of all subjects and seeds."""
    seeds = [seed for found in results for seed in found["entropy"]]
    rows = []
    for name in seeds[0]["order"]:
        entries = [seed["order"][name] for seed in seeds]
        bounds = [seed["bounds"][name] for seed in seeds]
        rows.append(
            [
                name,
                f"{min(one['kendall'] for one in entries):.4f}",
                f"{max(one['inversions'] for one in entries)} of {entries[0]['pairs']:,}",
                f"{min(one['pairs_kept_by_the_bound'] for one in entries):,}",
                f"{sum(one['outside'] for one in bounds)} of {sum(one['rows'] for one in bounds):,}",
            ]
        )
    headings = ["variant, epsilon", "least Kendall", "most pairs in another order", "pairs the bound keeps, at least"]
    return _table([*headings, "rows outside the bound"], rows)


def _range(values: Sequence[Any], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(headings)} |", "|---" + "|---:" * (len(headings) - 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
