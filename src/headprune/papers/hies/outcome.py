"""What the cells come to: means over seeds, differences with intervals, and tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headprune.measure.intervals import Difference, repeated_difference
from headprune.papers.hies.plan import HIES, NAMES
from headprune.papers.hies.study import decode, weighted_area
from headprune.papers.tables import Cell, Table

HIS = "HIS"
MEASURES = ("metric", "stability")
PERCENT = 100


class Outcome:
    """The finished seeds of one subject."""

    def __init__(self, contents: Sequence[Mapping[str, Any]]) -> None:
        self.about: Mapping[str, Any] = contents[0]["subject"]
        self.results = [content["result"] for content in contents]
        self.seeds = [result["seed"] for result in self.results]
        self.shares: list[float] = list(contents[0]["settings"]["shares"])
        self._cells = {
            (cell["criterion"], cell["share"], cell["seed"]): cell
            for result in self.results
            for cell in result["cells"]
        }

    @property
    def name(self) -> str:
        return str(self.about["name"])

    @property
    def title(self) -> str:
        return str(self.about["title"])

    def cells(self, name: str, share: float) -> list[Mapping[str, Any]]:
        return [self._cells[name, share, seed] for seed in self.seeds]

    def mean(self, name: str, share: float, measure: str) -> float:
        return statistics.fmean(cell[measure] for cell in self.cells(name, share))

    def deviation(self, name: str, share: float, measure: str) -> float | None:
        """Standard deviation over seeds."""
        values = [cell[measure] for cell in self.cells(name, share)]
        return statistics.stdev(values) if len(values) > 1 else None

    def per_sample(self, name: str, shares: Sequence[float], measure: str) -> torch.Tensor:
        """[seeds x samples], the mean over the shares."""
        return torch.stack(
            [torch.stack([decode(cell["per_sample"][measure]) for cell in self.cells(name, share)]) for share in shares]
        ).mean(0)

    def difference(self, one: str, other: str, shares: Sequence[float], measure: str) -> Difference:
        return repeated_difference(self.per_sample(one, shares, measure), self.per_sample(other, shares, measure))

    def correlation(self, one: str, other: str) -> list[float]:
        """Spearman's, of the scores of each seed."""
        return [result["correlations"][one][other] for result in self.results]

    def alpha_areas(self) -> dict[str, list[float]]:
        """Alpha -> weighted areas of the seeds, on the validation samples."""
        return {alpha: [result["areas"][alpha] for result in self.results] for alpha in self.results[0]["areas"]}

    def area(self, name: str, measure: str) -> float:
        return weighted_area(self.shares, [self.mean(name, share, measure) for share in self.shares])

    def sizes(self) -> dict[tuple[str, int], list[dict[str, float]]]:
        """(criterion, calibration samples) -> accuracy by share, of every seed; empty where it was not measured."""
        found: dict[tuple[str, int], list[dict[str, float]]] = {}
        for result in self.results:
            for row in result.get("sizes", ()):
                found.setdefault((row["criterion"], row["size"]), []).append(row["metric"])
        return found

    def dispersion(self, name: str, shares: Sequence[float]) -> list[float]:
        """How evenly the removed heads lie over the sites: the entropy of their distribution, over its largest value;
        the mean over the shares, of every seed."""
        dense = [len(heads) for heads in self.heads()]
        values = []
        for seed in self.seeds:
            at_shares = []
            for share in shares:
                kept = self._cells[name, share, seed]["kept"].values()
                gone = [total - len(heads) for total, heads in zip(dense, kept, strict=True)]
                parts = [count / sum(gone) for count in gone if count]
                at_shares.append(-math.fsum(part * math.log(part) for part in parts) / math.log(len(dense)))
            values.append(statistics.fmean(at_shares))
        return values

    def alpha_curves(self) -> dict[str, list[float]]:
        """Alpha -> accuracy by share on the validation samples, the mean over seeds."""
        curves = [result["curves"] for result in self.results]
        return {
            alpha: [statistics.fmean(values) for values in zip(*(curve[alpha] for curve in curves), strict=True)]
            for alpha in curves[0]
        }

    def heads(self) -> list[set[int]]:
        """The heads of every site: each is kept by some cell, or removed with all of its site."""
        heads: dict[str, set[int]] = {}
        for cell in self._cells.values():
            for path, kept in cell["kept"].items():
                heads.setdefault(path, set()).update(kept)
        return list(heads.values())

    def rows(self) -> list[dict[str, Any]]:
        """A row per criterion and share: what results.json has of all seeds together."""
        rows = []
        for name in NAMES:
            for share in self.shares:
                row: dict[str, Any] = {"subject": self.name, "criterion": name, "share": share}
                for measure in MEASURES:
                    values = [cell[measure] for cell in self.cells(name, share)]
                    row[measure] = statistics.fmean(values)
                    row[f"{measure}_deviation"] = self.deviation(name, share, measure)
                    row[f"{measure}_range"] = [min(values), max(values)]
                    if name != HIES:
                        row[f"{measure}_of_hies_minus_this"] = list(self.difference(HIES, name, [share], measure))
                rows.append(row)
        return rows


def points(gap: Difference) -> str:
    """A difference of shares in percentage points, with its interval."""
    return f"{PERCENT * gap.value:+.1f} [{PERCENT * gap.low:+.1f}, {PERCENT * gap.high:+.1f}]"


# --- tables ---


def tables_of(outcomes: Sequence[Outcome]) -> list[Table]:
    """Quality, stability, HIES against HIS, the choice of alpha, and how alike the orders of heads are."""
    first = outcomes[0]
    percents = [f"{share:.0%}" for share in first.shares]
    quality, stability = (
        [
            [
                outcome.title,
                criterion,
                *(_mean_and_deviation(outcome, criterion, share, measure) for share in outcome.shares),
                f"{PERCENT * outcome.area(criterion, measure):.1f}",
            ]
            for outcome in outcomes
            for criterion in NAMES
        ]
        for measure in MEASURES
    )
    gaps = [
        [
            outcome.title,
            label,
            *(points(outcome.difference(HIES, HIS, [share], measure)) for share in outcome.shares),
        ]
        for outcome in outcomes
        for measure, label in zip(MEASURES, ("accuracy", "stability"), strict=True)
    ]
    alphas = [
        [
            outcome.title,
            *(f"{PERCENT * statistics.fmean(values):.1f}" for values in outcome.alpha_areas().values()),
            ", ".join(f"{result['alpha']:g}" for result in outcome.results),
        ]
        for outcome in outcomes
    ]
    names = [name for name in NAMES if name != "random"]
    correlations = [
        [outcome.title, one, *(f"{statistics.fmean(outcome.correlation(one, other)):.2f}" for other in names)]
        for outcome in outcomes
        for one in names
    ]
    by_share = ["Model", "Criterion", *percents, "Weighted area"]
    return [
        _table(1, "Accuracy (%) by criterion and share of heads removed", by_share, quality, outcomes),
        _table(2, "Stability: share (%) of predictions equal to the dense model's", by_share, stability, outcomes),
        _table(3, "HIES minus HIS, in points, with 95 % intervals", ["Model", "Measure", *percents], gaps, outcomes),
        _table(
            4,
            "Weighted area (%) of HIES on the validation samples by alpha, and the alpha chosen for each seed",
            ["Model", *(f"alpha={alpha}" for alpha in first.alpha_areas()), "Chosen"],
            alphas,
            outcomes,
        ),
        _table(5, "Spearman's correlation of scores", ["Model", "Criterion", *names], correlations, outcomes),
        _table(
            6,
            "Accuracy (%) by the number of calibration samples",
            ["Model", "Criterion", "Samples", *percents],
            [row for outcome in outcomes for row in _size_rows(outcome)],
            outcomes,
        ),
        _table(
            7,
            "FLOPs left (%) by the share of heads removed",
            ["Model", *percents],
            [
                [outcome.title, *(f"{PERCENT * left:.1f}" for left in outcome.about["flops_left"])]
                for outcome in outcomes
                if "flops_left" in outcome.about
            ],
            outcomes,
        ),
    ]


def _size_rows(outcome: Outcome) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for (name, size), seeds in outcome.sizes().items():
        cells = [[PERCENT * values[f"{share:g}"] for values in seeds] for share in outcome.shares]
        shown = [
            f"{statistics.fmean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")
            for values in cells
        ]
        rows.append([outcome.title, name, size, *shown])
    return rows


def _table(
    number: int, title: str, headings: Sequence[str], rows: Sequence[Sequence[Cell]], outcomes: Sequence[Outcome]
) -> Table:
    seeds = ", ".join(map(str, outcomes[0].seeds))
    samples = "; ".join(
        f"{outcome.title}: {outcome.about['samples']} samples, dense {PERCENT * outcome.about['dense']:.1f} %"
        for outcome in outcomes
    )
    note = f"Mean ± standard deviation over the seeds {seeds}, which draw the calibration samples. {samples}."
    return Table(number, f"{title}.", note, headings, rows)


def _mean_and_deviation(outcome: Outcome, name: str, share: float, measure: str) -> str:
    deviation = outcome.deviation(name, share, measure)
    mean = f"{PERCENT * outcome.mean(name, share, measure):.1f}"
    return mean if deviation is None else f"{mean} ± {PERCENT * deviation:.1f}"
