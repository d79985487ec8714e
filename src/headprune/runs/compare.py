"""Several criteria against each other: one run each, from the same dense model on the same split."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headprune import distributed
from headprune.criteria import make
from headprune.criteria.hies import Hies
from headprune.criteria.registry import split_suffix
from headprune.errors import CriterionError
from headprune.measure.at_budget import AtBudget, compared_at_budget
from headprune.measure.comparing import Comparison, compared
from headprune.measure.curves import weighted_area
from headprune.measure.trajectory import Step
from headprune.repair.regression import RepairKind
from headprune.report.loading import COMPARISON, curve_of, load_runs
from headprune.report.page import write_report
from headprune.report.words import verdict_of
from headprune.runs.experiment import Experiment, load
from headprune.runs.studies.plan import Group, Job, combination, expand, plan_group, run_name
from headprune.runs.studies.running import OneAfterTheOther, Watch, run_jobs
from headprune.search.config import PruneConfig
from headprune.search.pruner import prune
from headprune.store.files import write_text
from headprune.store.rundir import read_run
from headprune.units import resolve

ALPHAS = tuple(step / 10 for step in range(10))
FORMAT = 2  # of comparison.json; 1 was the list of rows alone
Row = Comparison | AtBudget

__all__ = [
    "Row",
    "check_sweep",
    "compare",
    "compare_group",
    "expand",
    "run_name",
    "sweep_alpha",
    "with_alpha",
    "write_comparison",
]


def compare(
    experiment: Experiment,
    criteria: Sequence[str],
    out: Path,
    *,
    trials: int = 1,
    overwrite: bool = False,
    on_run: Callable[[str], None] | None = None,
    on_step: Callable[[Step], None] | None = None,
) -> list[Row]:
    """Run every criterion to the end of its curve, or go on with what is there, and compare; best first.

    A criterion may bring its own compensation, as in "gnorm+lstsq"; the others take the experiment's. The best has the
    largest area under its curve over the range in which models are of use; with a budget, the best metric there.
    """
    group = plan_group(experiment, criteria, out, trials=trials)
    run_jobs(group.jobs, OneAfterTheOther(), watch=Told(on_run, on_step), overwrite=overwrite)
    return distributed.on_main(lambda: compare_group(group))


def compare_group(group: Group) -> list[Row]:
    """The rows of a comparison whose runs are finished, best first: along whole curves, or at their budget."""
    runs = {name: load_runs([job.folder for job in jobs]) for name, jobs in group.rows.items()}
    curves = [curve_of(name, found) for name, found in runs.items()]
    if group.experiment.budget is None:
        return list(compared(curves))
    ends = {name: [run.steps[: run.shown_first + 1] for run in found] for name, found in runs.items()}
    return list(compared_at_budget([replace(curve, trials=ends[curve.name]) for curve in curves]))


class Told(Watch):
    """Calls what somebody wants to be called with runs and steps."""

    def __init__(self, on_run: Callable[[str], None] | None, on_step: Callable[[Step], None] | None) -> None:
        self.on_run, self.on_step = on_run, on_step

    def started(self, job: Job, *, again: bool = False) -> None:
        if self.on_run is not None:
            self.on_run(job.name)

    def stepped(self, job: Job, step: Step) -> None:
        if self.on_step is not None:
            self.on_step(step)


def with_alpha(names: Sequence[str], alpha: float) -> list[str]:
    """The names with this alpha in hies; its other options stay."""
    changed = []
    for name in names:
        criterion, suffix = split_suffix(name)
        one = make(criterion)
        changed.append(str(replace(one, alpha=alpha) if isinstance(one, Hies) else one) + suffix)
    return changed


def check_sweep(names: Sequence[str], repair: str) -> RepairKind:
    """A sweep needs hies once, before anything runs; the compensation that hies has there."""
    found = [combination(name, repair)[1] for name in names if isinstance(make(split_suffix(name)[0]), Hies)]
    if len(found) != 1:
        raise CriterionError(f"--alpha sweep needs hies once among the criteria, but it is there {len(found)} times.")
    return found[0]


def write_comparison(out: Path, rows: Sequence[Row]) -> None:
    """comparison.json, best first, and report.html beside the runs."""
    first = rows[0]
    content: dict[str, Any] = {"format": FORMAT, "compared": _compared(out, rows)}
    if isinstance(first, AtBudget):
        content["budget"] = read_run(out / first.runs[0])[0]["result"]["rule"]
    else:
        content["usable_until"] = first.usable_until
    content |= {"verdict": verdict_of(rows), "criteria": [row.to_json() for row in rows]}
    write_text(out / COMPARISON, json.dumps(content, indent=2, allow_nan=False) + "\n")
    write_report([out / name for row in rows for name in row.runs], out / "report.html")


def _compared(out: Path, rows: Sequence[Row]) -> dict[str, Any]:
    """What a command needs to compare the same again: the names, the trials of random, and the compensation of all
    criteria that do not bring their own."""
    shared = [read_run(out / row.runs[0])[0]["settings"].get("repair") for row in rows if not split_suffix(row.name)[1]]
    trials = [len(row.runs) for row in rows if split_suffix(row.name)[0] == "random"]
    return {
        "criteria": [row.name for row in rows],
        "trials": max(trials, default=1),
        "repair": next(iter(shared), "none"),
    }


def sweep_alpha(experiment: Experiment, alphas: Sequence[float] = ALPHAS) -> tuple[float, dict[float, float]]:
    """The alpha of HIES with the largest weighted area under its curve on the calibration data, and all the areas.

    Curves are one-shot, in about twelve steps. A point weighs the share of heads that are left: where nothing is left,
    no alpha matters.
    """
    areas: dict[float, float] = {}
    subject, calibration, _ = load(experiment)
    batches = calibration.batches(experiment.batch_size)
    units = sum(len(site.units()) for site in resolve(subject.model))
    for alpha in alphas:
        result = prune(
            copy.deepcopy(subject.model),
            batches,
            config=PruneConfig(
                criterion=Hies(alpha=alpha),
                repair=experiment.repair,
                schedule="one-shot",
                every=max(1, units // 12),
                metric=experiment.metric,
                labels=experiment.labels,
                task=experiment.task,
            ),
        )
        areas[alpha] = weighted_area(result.metric, result.trajectory)
    best = max(areas, key=lambda alpha: (areas[alpha], -alpha))
    return best, areas
