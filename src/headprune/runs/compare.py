"""Compares criteria from the same dense model on the same data: a study of one comparison."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headprune.criteria import make
from headprune.criteria.hies import Hies
from headprune.criteria.registry import split_suffix
from headprune.errors import CriterionError
from headprune.former_names import former_names
from headprune.measure.curves import weighted_area
from headprune.repair.regression import RepairKind
from headprune.runs.experiment import Experiment, load
from headprune.runs.studies.comparison import Row
from headprune.runs.studies.run_study import SerialExecutor, run_study
from headprune.runs.studies.study_runs import combination, make_group
from headprune.search.config import PruneConfig
from headprune.search.observers import Observer
from headprune.search.pruner import prune
from headprune.units import resolve

ALPHAS = tuple(step / 10 for step in range(10))
__getattr__ = former_names(__name__)


def compare(
    experiment: Experiment,
    criteria: Sequence[str],
    out: Path,
    *,
    trials: int = 1,
    overwrite: bool = False,
    observer: Observer | None = None,
) -> list[Row]:
    """Run every criterion to the end of its curve, or resume its run, and compare; best first. Writes comparison.json
    and report.html beside the runs.

    A criterion may have its own repair, as in "gnorm+lstsq"; the others use the experiment's. The best has the largest
    area under its curve over the usable range; with a budget, the best metric there.
    """
    group = make_group(experiment, criteria, out, trials=trials)
    (result,) = run_study([group], SerialExecutor(), observer=observer, overwrite=overwrite)
    return result.rows


def with_alpha(names: Sequence[str], alpha: float) -> list[str]:
    """The names with this alpha in hies; its other options stay."""
    changed = []
    for name in names:
        criterion, suffix = split_suffix(name)
        instance = make(criterion)
        changed.append(str(replace(instance, alpha=alpha) if isinstance(instance, Hies) else instance) + suffix)
    return changed


def check_alpha_choice(names: Sequence[str], repair: str) -> RepairKind:
    """The repair of hies, which has to be among the criteria exactly once."""
    repairs = [combination(name, repair)[1] for name in names if isinstance(make(split_suffix(name)[0]), Hies)]
    if len(repairs) != 1:
        raise CriterionError(f"--alpha auto needs hies once among the criteria, but it is there {len(repairs)} times.")
    return repairs[0]


def choose_alpha(experiment: Experiment, alphas: Sequence[float] = ALPHAS) -> tuple[float, dict[float, float]]:
    """The alpha of HIES with the largest weighted area under its curve on the calibration data, and all areas.

    Curves are one-shot, in about twelve steps. A point is weighted by the share of heads that are left, as without
    heads alpha has no effect.
    """
    areas: dict[float, float] = {}
    inputs, calibration, _ = load(experiment)
    batches = calibration.batches(experiment.batch_size)
    units = sum(len(site.units()) for site in resolve(inputs.model))
    for alpha in alphas:
        result = prune(
            copy.deepcopy(inputs.model),
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
            progress=False,
        )
        areas[alpha] = weighted_area(result.metric, result.trajectory)
    best = max(areas, key=lambda alpha: (areas[alpha], -alpha))
    return best, areas
