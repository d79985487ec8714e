"""Several criteria against each other: one run each, from the same dense model on the same split."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headprune import ranks
from headprune.criteria import make
from headprune.criteria.hies import Hies
from headprune.criteria.registry import split_suffix
from headprune.errors import CriterionError
from headprune.measure.comparing import Comparison, compared
from headprune.measure.curves import weighted_area
from headprune.measure.trajectory import Step
from headprune.repair.plan import check_compensation
from headprune.repair.solve import Compensation
from headprune.report.loading import COMPARISON, curve_of, load_runs
from headprune.report.page import write_report
from headprune.report.words import verdict
from headprune.runs.experiment import Experiment, load, run_experiment
from headprune.search.config import PruneConfig
from headprune.search.pruner import prune
from headprune.store.files import write_text
from headprune.store.rundir import read_run
from headprune.units import resolve

ALPHAS = tuple(step / 10 for step in range(10))
FORMAT = 2  # of comparison.json; 1 was the list of rows alone


def compare(
    experiment: Experiment,
    criteria: Sequence[str],
    out: Path,
    *,
    trials: int = 1,
    overwrite: bool = False,
    on_run: Callable[[str], None] | None = None,
    on_step: Callable[[Step], None] | None = None,
) -> list[Comparison]:
    """Run every criterion to the end of its curve, or go on with what is there, and compare; best first.

    A criterion may bring its own compensation, as in "gnorm+lstsq"; the others take the experiment's. The best has the
    largest area under its curve over the range in which models are of use.
    """
    done: list[tuple[str, list[str]]] = []
    for spec in expand(criteria, experiment.compensate):
        criterion, compensate = combination(spec, experiment.compensate)
        suffix = spec.removeprefix(criterion)
        specs = [spec]
        if criterion == "random":
            specs = [f"random(seed={experiment.seed + trial}){suffix}" for trial in range(trials)]
        folders = []
        for one in specs:
            folder = out / run_name(one)
            folders.append(folder.name)
            if on_run is not None:
                on_run(one)
            own = replace(experiment, criterion=one.removesuffix(suffix), compensate=compensate, explore=True)
            run_experiment(own, folder, overwrite=overwrite, measure=False, on_step=on_step)
        done.append((spec, folders))
    return ranks.by_first(
        lambda: compared([curve_of(spec, load_runs([out / one for one in own])) for spec, own in done])
    )


def with_alpha(names: Sequence[str], alpha: float) -> list[str]:
    """The names with this alpha in hies; its other options stay."""
    changed = []
    for name in names:
        criterion, suffix = split_suffix(name)
        one = make(criterion)
        changed.append(str(replace(one, alpha=alpha) if isinstance(one, Hies) else one) + suffix)
    return changed


def check_sweep(names: Sequence[str], compensate: str) -> Compensation:
    """A sweep needs hies once, before anything runs; the compensation that hies has there."""
    found = [combination(name, compensate)[1] for name in names if isinstance(make(split_suffix(name)[0]), Hies)]
    if len(found) != 1:
        raise CriterionError(f"--alpha sweep needs hies once among the criteria, but it is there {len(found)} times.")
    return found[0]


def write_comparison(out: Path, rows: Sequence[Comparison]) -> None:
    """comparison.json, best first, and report.html beside the runs."""
    content = {
        "format": FORMAT,
        "compared": _compared(out, rows),
        "usable_until": rows[0].usable_until,
        "verdict": verdict(rows),
        "criteria": [row.to_json() for row in rows],
    }
    write_text(out / COMPARISON, json.dumps(content, indent=2, allow_nan=False) + "\n")
    write_report([out / name for row in rows for name in row.runs], out / "report.html")


def _compared(out: Path, rows: Sequence[Comparison]) -> dict[str, Any]:
    """What a command needs to compare the same again: the names, the trials of random, and the compensation of all
    criteria that do not bring their own."""
    shared = [
        read_run(out / row.runs[0])[0]["settings"].get("compensate") for row in rows if not split_suffix(row.name)[1]
    ]
    trials = [len(row.runs) for row in rows if split_suffix(row.name)[0] == "random"]
    return {
        "criteria": [row.name for row in rows],
        "trials": max(trials, default=1),
        "compensate": next(iter(shared), "none"),
    }


def expand(criteria: Sequence[str], compensate: str = "none") -> list[str]:
    """The criteria as full names, each once; refused before anything runs. A compensation that is `compensate`, which
    all of them have unless they say otherwise, is not part of a name."""
    names = []
    for spec in criteria:
        criterion, own = combination(spec, compensate)
        names.append(criterion if own == compensate else f"{criterion}+{own}")
    if not names:
        raise CriterionError("Name at least one criterion to compare.")
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise CriterionError(f"Criterion {doubles[0]!r} is listed more than once.")
    return names


def combination(spec: str, compensate: str) -> tuple[str, Compensation]:
    """The full name of a criterion and its compensation: its own, as in "gnorm+lstsq", or `compensate`."""
    criterion, suffix = split_suffix(spec)
    own = check_compensation(suffix[1:] if suffix else compensate, budget=False)
    return str(make(criterion)), own


def run_name(spec: str) -> str:
    """A folder name for a criterion: letters, digits and a few signs that every file system takes."""
    return spec.replace(":", "-").replace("(", "-").replace(")", "").replace(",", "-").replace("=", "")


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
                compensate=experiment.compensate,
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
