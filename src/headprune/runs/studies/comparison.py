"""Compares the runs of a group: ranks criteria, and writes comparison.json beside the runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headprune.checkpoint.atomic_files import write_text
from headprune.config.groups import COMPARE_DEFAULTS
from headprune.criteria.registry import split_suffix
from headprune.errors import StudyError
from headprune.measure.compare_at_budget import AtBudget, rank_at_budget
from headprune.measure.compare_curves import Comparison, rank_curves
from headprune.reports.format import verdict_of
from headprune.reports.page import write_report
from headprune.reports.run_view import COMPARISON, curve_of, load_runs
from headprune.run_folder import read_run
from headprune.run_folder.run import REPORT
from headprune.runs.studies.study_runs import Group

FORMAT = 2  # of comparison.json; 1 was the list of rows alone
Row = Comparison | AtBudget


def compare_group(group: Group) -> list[Row]:
    """The rows of a comparison whose runs are finished, best first: along whole curves, or at their budget."""
    runs = {name: load_runs([job.folder for job in jobs]) for name, jobs in group.rows.items()}
    curves = [curve_of(name, trials) for name, trials in runs.items()]
    if group.experiment.budget is None:
        return list(rank_curves(curves, group.at))
    ends = {name: [run.steps[: run.shown_first + 1] for run in trials] for name, trials in runs.items()}
    return list(rank_at_budget([replace(curve, trials=ends[curve.name]) for curve in curves]))


def refuse_other_files(folders: Iterable[Path], record: str, beside: str) -> None:
    """Refuse folders where the results would replace files of other programs: `record` is the JSON file with the
    criteria, written first, and `beside` the other file."""
    for folder in folders:
        try:
            content = json.loads((folder / record).read_text(encoding="utf-8"))
            is_ours = all("name" in row for row in (content if isinstance(content, list) else content["criteria"]))
        except (OSError, ValueError, KeyError, TypeError):
            is_ours = False
        present = [folder / name for name in (record, beside) if (folder / name).exists()]
        if present and not is_ours:
            raise StudyError(
                f"{present[0]} would be replaced, and is not of an earlier comparison; choose another directory."
            )


def write_comparison(group: Group, rows: Sequence[Row]) -> None:
    """comparison.json, best first, and report.html beside the runs."""
    out, first = group.folder, rows[0]
    content: dict[str, Any] = {"format": FORMAT, "compared": _settings_json(group, rows)}
    if isinstance(first, AtBudget):
        content["budget"] = read_run(out / first.runs[0])[0]["result"]["rule"]
    else:
        content["usable_until"] = first.usable_until
    content |= {"verdict": verdict_of(rows), "criteria": [row.to_json() for row in rows]}
    write_text(out / COMPARISON, json.dumps(content, indent=2, allow_nan=False) + "\n")
    write_report([out / name for row in rows for name in row.runs], out / REPORT)


def _settings_json(group: Group, rows: Sequence[Row]) -> dict[str, Any]:
    """The options to repeat the comparison: the criteria, the trials of random, and the repair and the schedule of all
    criteria that have none of their own; without a schedule they have the one that they were published with."""
    trials = [len(row.runs) for row in rows if split_suffix(row.name)[0] == "random"]
    return {
        "criteria": [row.name for row in rows],
        "trials": max(trials, default=1),
        **({"at": list(group.at)} if group.experiment.budget is None else {}),
        "repair": group.experiment.repair,
        "schedule": group.experiment.explicit["schedule"],
        "rescore": group.experiment.explicit["rescore"] or COMPARE_DEFAULTS["rescore"],
    }
