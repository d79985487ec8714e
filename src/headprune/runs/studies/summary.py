"""The summary of a study: a comparison per model, data, seed and budget, and the ranks of criteria over all of them."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune.checkpoint.atomic_files import write_text
from headprune.former_names import former_names
from headprune.measure.compare_at_budget import AtBudget
from headprune.measure.compare_curves import Comparison
from headprune.measure.trajectory import finite_or_none
from headprune.runs.studies.comparison import Row
from headprune.runs.studies.spec import Study
from headprune.runs.studies.study_runs import Group, study_json

FORMAT = 1  # of study.json
INDEX, TABLE = "study.json", "study.csv"
__getattr__ = former_names(__name__)


@dataclass(frozen=True)
class GroupResult:
    """One comparison of a study, with its rows best first."""

    group: Group
    rows: list[Row]

    @property
    def best(self) -> str | None:
        return self.rows[0].name if self.ranks else None

    @property
    def ranks(self) -> dict[str, float]:
        """Criterion -> rank, from 1; equal ones have the mean of their ranks. Empty where the rows cannot be ranked."""
        if len(self.rows) > 1 and not self.rows[0].ahead:
            return {}
        merits = [merit(row) for row in self.rows]
        ranks: dict[str, float] = {}
        for row, merit_of_row in zip(self.rows, merits, strict=True):
            equal_ranks = [rank for rank, other in enumerate(merits, 1) if other == merit_of_row]
            ranks[row.name] = statistics.fmean(equal_ranks)
        return ranks


@dataclass(frozen=True)
class Standing:
    """The ranks of a criterion over all comparisons."""

    name: str
    mean_rank: float
    best_in: int
    groups: int

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "mean_rank": self.mean_rank, "best_in": self.best_in, "groups": self.groups}


def merit(row: Row) -> tuple[float, ...]:
    """The values by which a row is ranked in its comparison."""
    return (row.merit,) if isinstance(row, AtBudget) else (row.usable_area, row.area)


def standings(results: Sequence[GroupResult]) -> list[Standing]:
    """The criteria by their mean rank, best first."""
    names = dict.fromkeys(row.name for result in results for row in result.rows)
    ranked = []
    for name in names:
        ranks = [result.ranks[name] for result in results if name in result.ranks]
        if ranks:
            best = sum(result.best == name for result in results)
            ranked.append(Standing(name, statistics.fmean(ranks), best, len(ranks)))
    return sorted(ranked, key=lambda standing: standing.mean_rank)


def write_index(study: Study, out: Path, results: Sequence[GroupResult]) -> dict[str, Any]:
    """study.json, with all comparisons and ranks of criteria, and study.csv, a line per comparison, criterion and share
    removed."""
    content = {
        "format": FORMAT,
        "study": study_json(study),
        "groups": [_group_json(result, out) for result in results],
        "criteria": [standing.to_json() for standing in standings(results)],
        "over_seeds": over_seeds(results),
    }
    write_text(out / INDEX, json.dumps(content, indent=2, allow_nan=False) + "\n")
    write_text(out / TABLE, _table(results))
    return content


def value_of(row: Row) -> float | None:
    """The value of a row: its metric at the budget, or the area of its curve over the usable range."""
    return row.metric if isinstance(row, AtBudget) else row.usable_area


def _group_json(result: GroupResult, out: Path) -> dict[str, Any]:
    shared, ranks = result.group.experiment, result.ranks
    return {
        "folder": str(result.group.folder.relative_to(out)),
        "model": shared.model,
        "data": shared.data,
        "seed": shared.seed,
        "budget": None if shared.budget is None else shared.budget.rule(),
        "measured": result.rows[0].measured.name,
        "ranked_by": "metric" if isinstance(result.rows[0], AtBudget) else "usable_area",
        "best": result.best,
        "criteria": [
            {
                "name": row.name,
                "schedule": row.schedule,
                "rank": ranks.get(row.name),
                "value": _finite(value_of(row)),
                "interval": list(row.interval) if isinstance(row, AtBudget) and row.interval else None,
                **({"at": dict(row.metric)} if isinstance(row, Comparison) else {}),
            }
            for row in result.rows
        ],
    }


def over_seeds(results: Sequence[GroupResult]) -> list[dict[str, Any]]:
    """Per model, data, budget and criterion: the mean over seeds, the standard deviation of their values, and the
    lowest and highest of them. Of curves it is the whole area, since the usable range differs from seed to seed, and
    the metric `at` every share removed."""
    by_model_and_data: dict[tuple[str, ...], list[GroupResult]] = {}
    for result in results:
        model, data, _, budget = result.group.labels
        by_model_and_data.setdefault((model, data, budget), []).append(result)
    means = []
    for (model, data, budget), results_of_seeds in by_model_and_data.items():
        for name in dict.fromkeys(row.name for row in results_of_seeds[0].rows):
            rows = [row for result in results_of_seeds for row in result.rows if row.name == name]
            curves = [row for row in rows if isinstance(row, Comparison)]
            values = [row.metric if isinstance(row, AtBudget) else row.area for row in rows]
            ranks = [result.ranks[name] for result in results_of_seeds if name in result.ranks]
            means.append(
                {
                    "model": model,
                    "data": data,
                    "budget": budget,
                    "name": name,
                    "schedule": rows[0].schedule,
                    "measured": rows[0].measured.name,
                    "seeds": len(results_of_seeds),
                    "mean_rank": statistics.fmean(ranks) if ranks else None,
                    **_spread(values),
                    "at": {share: _spread([row.metric.get(share) for row in curves]) for share in curves[0].metric}
                    if curves
                    else {},
                }
            )
    return means


def _spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean, standard deviation (of a sample of seeds) and range; null where a value is missing, or for one seed."""
    known = [value for value in map(_finite, values) if value is not None]
    complete = bool(known) and len(known) == len(values)
    return {
        "mean": statistics.fmean(known) if complete else None,
        "sd": statistics.stdev(known) if complete and len(known) > 1 else None,
        "lowest": min(known) if complete else None,
        "highest": max(known) if complete else None,
    }


HEADINGS = (
    *("Model", "Data", "Seed", "Budget", "Criterion", "Schedule", "Rank", "Metric", "At", "Value", "Low", "High"),
    *("SD", "Lowest", "Highest"),
)
ALL = "all"  # the seed of lines over seeds


def _table(results: Sequence[GroupResult]) -> str:
    """A line per comparison, criterion and share removed; without a share it is the area of a curve, or the metric at a
    budget. Where there are several seeds, the same over all of them."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(HEADINGS)
    none = ["", ""]
    for result in results:
        model, data, _, budget = result.group.labels
        for row in result.rows:
            ends = list(row.interval) if isinstance(row, AtBudget) and row.interval else none
            start = [model, data, result.group.experiment.seed, budget, row.name, row.schedule]
            start += [result.ranks.get(row.name, ""), row.measured.name]
            lines.writerow([*start, "", _finite(value_of(row)), *ends, "", *none])
            if isinstance(row, Comparison):
                for share, value in row.metric.items():
                    lines.writerow([*start, share, _finite(value), *(row.interval[share] or none), "", *none])
    for mean in over_seeds(results):
        start = [mean["model"], mean["data"], ALL, mean["budget"], mean["name"], mean["schedule"]]
        start += [mean["mean_rank"], mean["measured"]]
        for share, part in {"": mean, **mean["at"]}.items() if mean["seeds"] > 1 else ():
            lines.writerow([*start, share, part["mean"], *none, part["sd"], part["lowest"], part["highest"]])
    return text.getvalue()


def _finite(value: float | None) -> float | None:
    return None if value is None else finite_or_none(value)
