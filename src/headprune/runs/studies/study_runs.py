"""The runs of a study: the experiment and folder of each, and the groups that are compared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune.config.groups import COMPARE_DEFAULTS
from headprune.criteria import make
from headprune.criteria.registry import split_suffix
from headprune.errors import CriterionError
from headprune.repair.apply import check_repair
from headprune.repair.regression import RepairKind
from headprune.runs.studies.spec import Study
from headprune.search.config import Experiment

WHOLE_CURVE = "curve"  # the name in place of a budget, for whole curves


@dataclass(frozen=True)
class Job:
    """One run."""

    experiment: Experiment
    folder: Path
    name: str  # the criterion, with its repair where it has its own
    labels: tuple[str, ...] = ()  # model, data, seed and budget, as in names of folders
    subject_number: int = 0  # equal for runs that load the same model and data


@dataclass(frozen=True)
class Group:
    """Runs that are compared: of one model on the same samples, to the end or to the same budget."""

    experiment: Experiment  # the settings that they share
    folder: Path
    rows: Mapping[str, tuple[Job, ...]]  # criterion -> its runs: several for random
    labels: tuple[str, ...] = ()

    @property
    def jobs(self) -> list[Job]:
        return [job for jobs in self.rows.values() for job in jobs]


def make_group(
    experiment: Experiment,
    criteria: Sequence[str],
    folder: Path,
    *,
    trials: int = 1,
    labels: tuple[str, ...] = (),
    subject_number: int = 0,
) -> Group:
    """One run per criterion, and `trials` of random. A criterion may have its own repair, as in "gnorm+lstsq"; the
    others use the experiment's. All score equally often, so that their curves have the same steps."""
    rescore = experiment.explicit["rescore"] or COMPARE_DEFAULTS["rescore"]
    experiment = experiment.with_options(rescore=rescore)
    budget = experiment.budget is not None
    rows: dict[str, tuple[Job, ...]] = {}
    for spec in expand(criteria, experiment.repair, budget=budget):
        criterion, repair = combination(spec, experiment.repair, budget=budget)
        suffix = spec.removeprefix(criterion)
        specs = [spec]
        if criterion == "random":
            specs = [f"random(seed={experiment.seed + trial}){suffix}" for trial in range(trials)]
        rows[spec] = tuple(
            Job(
                experiment.with_options(criterion=name.removesuffix(suffix), repair=repair, explore=not budget),
                folder / run_name(name),
                name,
                labels,
                subject_number,
            )
            for name in specs
        )
    return Group(experiment, folder, rows, labels)


def make_groups(study: Study, out: Path) -> list[Group]:
    """All groups of a study: one in `out` itself, several in folders by model, data, seed and budget."""
    models = short_names([subject["model"] for subject in study.subjects])
    sources = short_names([subject["data"] for subject in study.subjects])
    names_so_far: list[tuple[str, str]] = []
    groups = []
    for number, subject in enumerate(study.subjects):
        name = models[subject["model"]], sources[subject["data"]]
        names_so_far.append(name)
        if names_so_far.count(name) > 1:  # the same data with other settings
            name = name[0], f"{name[1]}-{names_so_far.count(name)}"
        for seed in study.seeds:
            for budget in study.budgets:
                experiment = Experiment(**{**study.settings, **subject, **budget, "seed": seed})
                labels = (*name, f"seed{seed}", budget_name(experiment))
                folder = out.joinpath(*labels) if study.size > 1 else out
                groups.append(
                    make_group(
                        experiment, study.criteria, folder, trials=study.trials, labels=labels, subject_number=number
                    )
                )
    return groups


def budget_name(experiment: Experiment) -> str:
    """The folder name of a budget, such as flops-0.5 or, with several points, flops-0.8-0.5."""
    budget = experiment.budget
    if budget is None:
        return WHOLE_CURVE
    first, *others = (budget.label(share) for share in budget.shares)
    return "-".join([first, *(label.partition("-")[2] for label in others)])


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """A folder name for each path: as many of its last parts as make it unique."""
    distinct = list(dict.fromkeys(paths))
    longest = max(len(Path(path).parts) for path in distinct)
    for length in range(1, longest + 1):
        names_by_path = {path: _folder_name("-".join(Path(path).parts[-length:])) for path in distinct}
        if len(set(names_by_path.values())) == len(distinct):
            return names_by_path
    return {path: f"{name}-{number}" for number, (path, name) in enumerate(names_by_path.items(), 1)}


def _folder_name(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "here"


def expand(criteria: Sequence[str], repair: str = "none", *, budget: bool = False) -> list[str]:
    """The full names of the criteria, each once; raises before anything runs. The common `repair` is not part of a
    name."""
    names = []
    for spec in criteria:
        criterion, repair_of_criterion = combination(spec, repair, budget=budget)
        names.append(criterion if repair_of_criterion == repair else f"{criterion}+{repair_of_criterion}")
    if not names:
        raise CriterionError("Name at least one criterion to compare.")
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise CriterionError(f"Criterion {doubles[0]!r} is listed more than once.")
    return names


def combination(spec: str, repair: str, *, budget: bool = False) -> tuple[str, RepairKind]:
    """The full name of a criterion and its repair: its own, as in "gnorm+lstsq", or `repair`."""
    criterion, suffix = split_suffix(spec)
    repair_of_criterion = check_repair(suffix[1:] if suffix else repair, budget=budget)
    return str(make(criterion)), repair_of_criterion


def run_name(spec: str) -> str:
    """The folder name of a criterion, with characters that every file system supports."""
    return spec.replace(":", "-").replace("(", "-").replace(")", "").replace(",", "-").replace("=", "")


def study_json(study: Study) -> dict[str, Any]:
    """The description of a study for JSON."""
    return {
        "subjects": [dict(subject) for subject in study.subjects],
        "criteria": list(study.criteria),
        "seeds": list(study.seeds),
        "budgets": [dict(budget) for budget in study.budgets if budget],
        "trials": study.trials,
        "settings": {name: list(v) if isinstance(v, tuple) else v for name, v in study.settings.items()},
    }
