"""What a study comes to: a comparison per model, data, seed and budget, and how criteria rank over all of them."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune import distributed
from headprune.measure.at_budget import AtBudget
from headprune.measure.trajectory import plain
from headprune.runs.compare import Row, compare_group, write_comparison
from headprune.runs.studies.asked import Study
from headprune.runs.studies.plan import Group, settings_in
from headprune.runs.studies.running import Executor, Watch, run_jobs
from headprune.store.files import write_text

FORMAT = 1  # of sweep.json
INDEX, TABLE = "sweep.json", "sweep.csv"


@dataclass(frozen=True)
class Compared:
    """A comparison of a study."""

    group: Group
    rows: list[Row]

    @property
    def best(self) -> str | None:
        return self.rows[0].name if self.ranks else None

    @property
    def ranks(self) -> dict[str, float]:
        """Criterion -> place, from 1; equal ones share the mean of theirs. Empty where the rows cannot be ranked."""
        if len(self.rows) > 1 and not self.rows[0].ahead:
            return {}
        merits = [merit(row) for row in self.rows]
        places: dict[str, float] = {}
        for row, own in zip(self.rows, merits, strict=True):
            same = [place for place, other in enumerate(merits, 1) if other == own]
            places[row.name] = statistics.fmean(same)
        return places


@dataclass(frozen=True)
class Standing:
    """A criterion over all comparisons that rank it."""

    name: str
    mean_rank: float
    best_in: int
    groups: int

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "mean_rank": self.mean_rank, "best_in": self.best_in, "groups": self.groups}


def run_study(
    groups: Sequence[Group], executor: Executor, *, watch: Watch | None = None, overwrite: bool = False
) -> list[Compared]:
    """Do all runs, or go on with what is there, compare those that belong together, and write each comparison down."""
    run_jobs([job for group in groups for job in group.jobs], executor, watch=watch or Watch(), overwrite=overwrite)

    def compare_all() -> list[Compared]:
        found = [Compared(group, compare_group(group)) for group in groups]
        for one in found:
            write_comparison(one.group.folder, one.rows)
        return found

    return distributed.on_main(compare_all)


def merit(row: Row) -> tuple[float, ...]:
    """What ranks a row in its comparison."""
    return (row.merit,) if isinstance(row, AtBudget) else (row.usable_area, row.area)


def standings(found: Sequence[Compared]) -> list[Standing]:
    """The criteria by their mean rank, best first."""
    names = dict.fromkeys(row.name for one in found for row in one.rows)
    result = []
    for name in names:
        ranks = [one.ranks[name] for one in found if name in one.ranks]
        if ranks:
            best = sum(one.best == name for one in found)
            result.append(Standing(name, statistics.fmean(ranks), best, len(ranks)))
    return sorted(result, key=lambda standing: standing.mean_rank)


def write_index(study: Study, out: Path, found: Sequence[Compared]) -> dict[str, Any]:
    """sweep.json, with all comparisons and how criteria stand, and sweep.csv, a line per comparison and criterion."""
    content = {
        "format": FORMAT,
        "study": settings_in(study),
        "groups": [_group_json(one, out) for one in found],
        "criteria": [standing.to_json() for standing in standings(found)],
        "over_seeds": _over_seeds(found),
    }
    write_text(out / INDEX, json.dumps(content, indent=2, allow_nan=False) + "\n")
    write_text(out / TABLE, _table(found))
    return content


def value_of(row: Row) -> float | None:
    """The number that a row is known by: its metric at the budget, or the area of its curve over the usable range."""
    return row.metric if isinstance(row, AtBudget) else row.usable_area


def _group_json(one: Compared, out: Path) -> dict[str, Any]:
    shared, ranks = one.group.experiment, one.ranks
    return {
        "folder": str(one.group.folder.relative_to(out)),
        "model": shared.model,
        "data": shared.data,
        "seed": shared.seed,
        "budget": None if shared.budget is None else shared.budget.rule(),
        "measured": one.rows[0].measured.name,
        "ranked_by": "metric" if isinstance(one.rows[0], AtBudget) else "usable_area",
        "best": one.best,
        "criteria": [
            {
                "name": row.name,
                "rank": ranks.get(row.name),
                "value": _plain(value_of(row)),
                "interval": list(row.interval) if isinstance(row, AtBudget) and row.interval else None,
            }
            for row in one.rows
        ],
    }


def _over_seeds(found: Sequence[Compared]) -> list[dict[str, Any]]:
    """Per model, data, budget and criterion: the mean over seeds, and the lowest and highest of them. Of curves it is
    the whole area, since where models stop being of use differs from seed to seed."""
    together: dict[tuple[str, ...], list[Compared]] = {}
    for one in found:
        model, data, _, budget = one.group.place
        together.setdefault((model, data, budget), []).append(one)
    result = []
    for (model, data, budget), parts in together.items():
        for name in dict.fromkeys(row.name for row in parts[0].rows):
            rows = [row for one in parts for row in one.rows if row.name == name]
            values = [row.metric if isinstance(row, AtBudget) else row.area for row in rows]
            known = [value for value in map(_plain, values) if value is not None]
            whole = len(known) == len(parts)
            ranks = [one.ranks[name] for one in parts if name in one.ranks]
            result.append(
                {
                    "model": model,
                    "data": data,
                    "budget": budget,
                    "name": name,
                    "seeds": len(parts),
                    "mean_rank": statistics.fmean(ranks) if ranks else None,
                    "mean": statistics.fmean(known) if whole else None,
                    "lowest": min(known) if whole else None,
                    "highest": max(known) if whole else None,
                }
            )
    return result


def _table(found: Sequence[Compared]) -> str:
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["Model", "Data", "Seed", "Budget", "Criterion", "Rank", "Metric", "Value", "Low", "High"])
    for one in found:
        model, data, _, budget = one.group.place
        for row in one.rows:
            ends = list(row.interval) if isinstance(row, AtBudget) and row.interval else ["", ""]
            start = [model, data, one.group.experiment.seed, budget, row.name, one.ranks.get(row.name, "")]
            lines.writerow([*start, row.measured.name, _plain(value_of(row)), *ends])
    return text.getvalue()


def _plain(value: float | None) -> float | None:
    return None if value is None else plain(value)
