"""Chooses the alpha of hies for a comparison, on samples that no run of it scores or is evaluated on.

The choice is a file beside the runs, written after every alpha: an interrupted one goes on, a finished one is read.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headprune import distributed
from headprune.checkpoint.atomic_files import write_text
from headprune.criteria import make
from headprune.criteria.hies import Hies
from headprune.criteria.registry import split_suffix
from headprune.errors import CriterionError, RunError
from headprune.json_forms import Form, differing, other_settings
from headprune.measure.curves import weighted_area
from headprune.measure.trajectory import finite_or_none
from headprune.progress import tracked
from headprune.reports.run_view import COMPARISON
from headprune.run_folder.folder import as_json, read_record, versions
from headprune.run_folder.run import REPORT
from headprune.runs.experiment import load, settings_of
from headprune.runs.splits import default_validation, validation_examples
from headprune.runs.studies.comparison import refuse_other_files
from headprune.runs.studies.spec import Study
from headprune.runs.studies.study_runs import Combination, expand, make_groups
from headprune.search.config import Experiment
from headprune.search.pruner import prune
from headprune.search.settings import default_settings, migrated
from headprune.units import resolve

ALPHAS = tuple(step / 10 for step in range(10))
FILE = "alpha.json"
FORMAT = 1
ONE_SHOT_STEPS = 12  # removals by one scoring are in the same order, however many are measured
NUMBERS: Form = {str: (float, None)}
FORM: Form = {
    "settings": dict,
    "versions": dict,
    "samples": {"calibration": int, "validation": int},
    "areas": NUMBERS,
    "alpha": (float, None),
}


@dataclass(frozen=True)
class AlphaChoice:
    """The alpha with the largest weighted area under the curve of hies, and what it was chosen by."""

    alpha: float
    areas: dict[float, float]  # of every alpha
    schedule: str
    repair: str
    calibration: int  # samples that were scored
    validation: int  # samples that the curves were measured on

    def to_json(self) -> dict[str, Any]:
        return {
            "alpha": self.alpha,
            "areas": {f"{alpha:g}": finite_or_none(area) for alpha, area in self.areas.items()},
            "schedule": self.schedule,
            "repair": self.repair,
            "calibration": self.calibration,
            "validation": self.validation,
        }

    def __str__(self) -> str:
        areas = ", ".join(f"{alpha:g}: {area:.4f}" for alpha, area in self.areas.items())
        return (
            f"alpha of hies = {self.alpha:g}, by weighted area on {self.validation} validation samples, "
            f"{self.schedule}, repair {self.repair} ({areas})"
        )


def choose_alpha(
    experiment: Experiment, alphas: Sequence[float] = ALPHAS, *, record: Path | None = None, overwrite: bool = False
) -> AlphaChoice:
    """The alpha of `experiment`, a run by hies, with the largest weighted area under its curve on validation samples:
    of its data, and neither scored nor evaluated. Curves have its schedule and its repair, and go to the last head.

    A point is weighted by the share of heads that are left, as without heads alpha has no effect. One-shot curves are
    measured in about twelve steps. `record` is the file of the choice.
    """
    hies = experiment.criterion
    if not isinstance(hies, Hies):
        raise CriterionError(f"An alpha is chosen for hies, not for {hies}.")
    settings = as_json({**settings_of(experiment), "criterion": str(replace(hies, alpha=0.5)), "alphas": list(alphas)})
    content = None if record is None else distributed.on_main(lambda: _read(record, settings, overwrite))
    areas = {} if content is None else {float(alpha): _number(area) for alpha, area in content["areas"].items()}
    samples: dict[str, int] = {} if content is None else content["samples"]
    if len(areas) < len(alphas):
        samples = _measure(experiment, hies, alphas, areas, settings, record)
    best = max(areas, key=lambda alpha: (-math.inf if math.isnan(areas[alpha]) else areas[alpha], -alpha))
    if record is not None and (content is None or content["alpha"] is None):
        distributed.on_main(lambda: _write(record, settings, samples, areas, best))
    return AlphaChoice(
        best, areas, experiment.schedule, experiment.repair, samples["calibration"], samples["validation"]
    )


def _measure(
    experiment: Experiment,
    hies: Hies,
    alphas: Sequence[float],
    areas: dict[float, float],
    settings: dict[str, Any],
    record: Path | None,
) -> dict[str, int]:
    """Measure the areas that are missing; returns the numbers of samples."""
    inputs, calibration, _ = load(experiment)
    held = experiment
    if held.validation_samples is None:
        held = experiment.with_options(validation_samples=default_validation(experiment, len(inputs.examples)))
    validation = validation_examples(held, inputs.examples)
    samples = {"calibration": len(calibration), "validation": len(validation)}
    batches = calibration.batches(experiment.batch_size, full=hies.by_batch)
    every = experiment.every
    if experiment.schedule == "one-shot":
        units = sum(len(site.units()) for site in resolve(inputs.model))
        every = max(every, units // ONE_SHOT_STEPS)
    for alpha in tracked(list(alphas), "choosing alpha", len(alphas), unit="alpha"):
        if alpha in areas:
            continue
        result = prune(
            copy.deepcopy(inputs.model),
            batches,
            config=held.with_options(criterion=replace(hies, alpha=alpha), every=every, explore=True),
            evaluation=validation.batches(experiment.batch_size),
            progress=False,
        )
        areas[alpha] = weighted_area(result.metric, result.trajectory)
        if record is not None:
            distributed.on_main(lambda: _write(record, settings, samples, areas, None))
    return samples


def _read(record: Path, settings: dict[str, Any], overwrite: bool) -> dict[str, Any] | None:
    """The choice that an earlier process made or began with the same settings; any other is refused."""
    if not record.exists():
        return None
    content = read_record(record, FORM)  # raises for a file of another program
    if overwrite:
        return None
    recorded, now = migrated(content["settings"]), migrated(settings)
    different = differing(recorded, now, default_settings())
    if different:
        fix = "another directory, or --overwrite"
        raise RunError(other_settings(record, "choice of alpha", different, recorded, now, fix))
    return content


def _write(
    record: Path, settings: dict[str, Any], samples: dict[str, int], areas: dict[float, float], best: float | None
) -> None:
    content = {
        "format": FORMAT,
        "settings": settings,
        "versions": versions(),
        "samples": samples,
        "areas": {f"{alpha:g}": finite_or_none(area) for alpha, area in areas.items()},
        "alpha": best,
    }
    record.parent.mkdir(parents=True, exist_ok=True)
    write_text(record, json.dumps(content, indent=2, allow_nan=False) + "\n")


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def with_chosen_alpha(study: Study, out: Path, *, overwrite: bool = False) -> tuple[Study, AlphaChoice]:
    """The study of one comparison with the alpha that is chosen for its row of hies, under the schedule and the repair
    of that row; the validation samples stay out of all runs."""
    (group,) = make_groups(study, out)
    distributed.on_main(lambda: refuse_other_files([group.folder], COMPARISON, REPORT))
    combinations = expand(study.criteria, group.experiment.repair, group.experiment.explicit["schedule"])
    row = hies_row(combinations)
    (job,) = group.rows[row.name]
    choice = choose_alpha(job.experiment, record=out / FILE, overwrite=overwrite)
    names = [with_alpha(each.name, choice.alpha) if each is row else each.name for each in combinations]
    settings = {**study.settings, "validation_samples": choice.validation}
    return replace(study, criteria=tuple(names), settings=settings), choice


def hies_row(combinations: Sequence[Combination]) -> Combination:
    """The row of hies, which has to be among the criteria exactly once."""
    rows = [each for each in combinations if isinstance(make(each.criterion), Hies)]
    if len(rows) != 1:
        raise CriterionError(f"--alpha auto needs hies once among the criteria, but it is there {len(rows)} times.")
    return rows[0]


def with_alpha(name: str, alpha: float) -> str:
    """A name of hies with this alpha; its other options, its schedule and its repair stay."""
    criterion, suffix = split_suffix(name)
    instance = make(criterion)
    assert isinstance(instance, Hies)
    return str(replace(instance, alpha=alpha)) + suffix
