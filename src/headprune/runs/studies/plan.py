"""A study laid out as runs: which experiment goes into which folder, and which runs are compared with each other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune.criteria import make
from headprune.criteria.registry import split_suffix
from headprune.errors import CriterionError
from headprune.repair.apply import check_repair
from headprune.repair.regression import RepairKind
from headprune.runs.studies.asked import Study
from headprune.search.config import VERB_DEFAULTS, Experiment

WHOLE = "curve"  # in place of a budget, where runs go to the end


@dataclass(frozen=True)
class Job:
    """One run."""

    experiment: Experiment
    folder: Path
    name: str  # the criterion, and its compensation where it brings its own
    place: tuple[str, ...] = ()  # model, data, seed and budget as folders are named
    subject: int = 0  # equal for runs that load the same model and data


@dataclass(frozen=True)
class Group:
    """Runs that are compared with each other: of one model on the same samples, to the end or to the same budget."""

    experiment: Experiment  # what they share
    folder: Path
    rows: Mapping[str, tuple[Job, ...]]  # criterion -> its runs: several for random
    place: tuple[str, ...] = ()

    @property
    def jobs(self) -> list[Job]:
        return [job for jobs in self.rows.values() for job in jobs]


def plan_group(
    experiment: Experiment,
    criteria: Sequence[str],
    folder: Path,
    *,
    trials: int = 1,
    place: tuple[str, ...] = (),
    subject: int = 0,
) -> Group:
    """One run per criterion, and `trials` of random. A criterion may bring its own compensation, as in "gnorm+lstsq";
    the others take the experiment's. All score equally often, so that their curves have the same steps."""
    rescore = experiment.asked["rescore"] or VERB_DEFAULTS["compare"]["rescore"]
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
                experiment.with_options(criterion=one.removesuffix(suffix), repair=repair, explore=not budget),
                folder / run_name(one),
                one,
                place,
                subject,
            )
            for one in specs
        )
    return Group(experiment, folder, rows, place)


def plan_study(study: Study, out: Path) -> list[Group]:
    """All its comparisons: in `out` itself where there is one, in folders by model, data, seed and budget where there
    are several."""
    models = short_names([subject["model"] for subject in study.subjects])
    sources = short_names([subject["data"] for subject in study.subjects])
    taken: list[tuple[str, str]] = []
    groups = []
    for number, subject in enumerate(study.subjects):
        name = models[subject["model"]], sources[subject["data"]]
        taken.append(name)
        if taken.count(name) > 1:  # the same data, read in another way
            name = name[0], f"{name[1]}-{taken.count(name)}"
        for seed in study.seeds:
            for budget in study.budgets:
                experiment = Experiment(**{**study.settings, **subject, **budget, "seed": seed})
                place = (*name, f"seed{seed}", budget_name(experiment))
                folder = out.joinpath(*place) if study.size > 1 else out
                groups.append(
                    plan_group(experiment, study.criteria, folder, trials=study.trials, place=place, subject=number)
                )
    return groups


def budget_name(experiment: Experiment) -> str:
    """A budget as a folder can be named, such as flops-0.5 or, with points on the way, flops-0.8-0.5."""
    budget = experiment.budget
    if budget is None:
        return WHOLE
    first, *others = (budget.label(share) for share in budget.shares)
    return "-".join([first, *(label.partition("-")[2] for label in others)])


def short_names(places: Sequence[str]) -> dict[str, str]:
    """A folder name for each place: as many of its last parts as set it apart from the others."""
    distinct = list(dict.fromkeys(places))
    longest = max(len(Path(place).parts) for place in distinct)
    for length in range(1, longest + 1):
        found = {place: _plain("-".join(Path(place).parts[-length:])) for place in distinct}
        if len(set(found.values())) == len(distinct):
            return found
    return {place: f"{name}-{number}" for number, (place, name) in enumerate(found.items(), 1)}


def _plain(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name).strip("-.") or "here"


def expand(criteria: Sequence[str], repair: str = "none", *, budget: bool = False) -> list[str]:
    """The criteria as full names, each once; refused before anything runs. A compensation that is `repair`, which
    all of them have unless they say otherwise, is not part of a name."""
    names = []
    for spec in criteria:
        criterion, own = combination(spec, repair, budget=budget)
        names.append(criterion if own == repair else f"{criterion}+{own}")
    if not names:
        raise CriterionError("Name at least one criterion to compare.")
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise CriterionError(f"Criterion {doubles[0]!r} is listed more than once.")
    return names


def combination(spec: str, repair: str, *, budget: bool = False) -> tuple[str, RepairKind]:
    """The full name of a criterion and its compensation: its own, as in "gnorm+lstsq", or `repair`."""
    criterion, suffix = split_suffix(spec)
    own = check_repair(suffix[1:] if suffix else repair, budget=budget)
    return str(make(criterion)), own


def run_name(spec: str) -> str:
    """A folder name for a criterion: letters, digits and a few signs that every file system takes."""
    return spec.replace(":", "-").replace("(", "-").replace(")", "").replace(",", "-").replace("=", "")


def settings_in(study: Study) -> dict[str, Any]:
    """What was asked for, as JSON can hold it."""
    return {
        "subjects": [dict(subject) for subject in study.subjects],
        "criteria": list(study.criteria),
        "seeds": list(study.seeds),
        "budgets": [dict(budget) for budget in study.budgets if budget],
        "trials": study.trials,
        "settings": {name: list(v) if isinstance(v, tuple) else v for name, v in study.settings.items()},
    }
