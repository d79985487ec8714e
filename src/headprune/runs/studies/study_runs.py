"""The runs of a study: the experiment and folder of each, and the groups that are compared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune.config.groups import COMPARE_DEFAULTS
from headprune.criteria import make
from headprune.criteria.registry import CURVE_SCHEDULES, split_suffixes
from headprune.defaults import COMPARED_AT
from headprune.errors import CriterionError, ScheduleError
from headprune.repair.apply import check_repair
from headprune.repair.regression import RepairKind
from headprune.runs.studies.spec import Study
from headprune.search.config import Experiment, check_schedule
from headprune.search.rescore import EVERY

WHOLE_CURVE = "curve"  # the name in place of a budget, for whole curves
BUDGET_SCHEDULE = "rounds"  # of runs to a budget that name none


@dataclass(frozen=True)
class Job:
    """One run."""

    experiment: Experiment
    folder: Path
    name: str  # the criterion, with its schedule and repair where it has its own
    labels: tuple[str, ...] = ()  # model, data, seed and budget, as in names of folders
    subject_number: int = 0  # equal for runs that load the same model and data


@dataclass(frozen=True)
class Group:
    """Runs that are compared: of one model on the same samples, to the end or to the same budget."""

    experiment: Experiment  # the settings that they share
    folder: Path
    rows: Mapping[str, tuple[Job, ...]]  # criterion -> its runs: several for random
    labels: tuple[str, ...] = ()
    at: tuple[float, ...] = COMPARED_AT  # shares of heads removed at which curves are compared

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
    at: tuple[float, ...] = COMPARED_AT,
) -> Group:
    """One run per criterion, and `trials` of random. A criterion may have its own schedule and repair, as in
    "gnorm@one-shot+lstsq"; the others use the experiment's, or along curves the schedule they were published with. All
    greedy ones score equally often, so that their curves have the same steps."""
    rescore = experiment.explicit["rescore"] or COMPARE_DEFAULTS["rescore"]
    budget = experiment.budget is not None
    combinations = expand(criteria, experiment.repair, experiment.explicit["schedule"], budget=budget)
    rescored = {"greedy", None} & {each.schedule for each in combinations} or {each.schedule for each in combinations}
    rows: dict[str, tuple[Job, ...]] = {}
    for each in combinations:
        specs = [each.criterion]
        if each.criterion == "random":
            specs = [f"random(seed={experiment.seed + trial})" for trial in range(trials)]
        rows[each.name] = tuple(
            Job(
                experiment.with_options(
                    criterion=spec,
                    repair=each.repair,
                    schedule=each.schedule,
                    rescore=rescore if each.schedule in rescored else EVERY,
                    explore=not budget,
                ),
                folder / run_name(spec + each.suffix),
                spec + each.suffix,
                labels,
                subject_number,
            )
            for spec in specs
        )
    return Group(experiment, folder, rows, labels, at)


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
                        experiment,
                        study.criteria,
                        folder,
                        trials=study.trials,
                        labels=labels,
                        subject_number=number,
                        at=study.at,
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


@dataclass(frozen=True)
class Combination:
    """What a name in the list of criteria stands for."""

    criterion: str  # its full name
    repair: RepairKind
    schedule: str | None  # None: that of the budget
    suffix: str  # where schedule or repair differ from those that a name without them has

    @property
    def name(self) -> str:
        return self.criterion + self.suffix


def expand(
    criteria: Sequence[str], repair: str = "none", schedule: str | None = None, *, budget: bool = False
) -> list[Combination]:
    """The combinations that these names stand for, each once; raises before anything runs."""
    combinations = [combination(spec, repair, schedule, budget=budget) for spec in criteria]
    if not combinations:
        raise CriterionError("Name at least one criterion to compare.")
    names = [each.name for each in combinations]
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise CriterionError(f"Criterion {doubles[0]!r} is listed more than once.")
    return combinations


def combination(spec: str, repair: str, schedule: str | None = None, *, budget: bool = False) -> Combination:
    """A criterion with its own schedule and repair, as in "his@one-shot+lstsq"; without them with `repair`, and with
    `schedule` or along curves the one it was published with."""
    text, own_schedule, own_repair = split_suffixes(spec)
    chosen_repair = check_repair(repair if own_repair is None else own_repair, budget=budget)
    criterion = make(text)
    usual = schedule or (None if budget else criterion.schedule)
    chosen = usual if own_schedule is None else check_schedule(own_schedule)
    if not budget and chosen not in CURVE_SCHEDULES:
        raise ScheduleError(
            f"Along curves the schedule is {' or '.join(CURVE_SCHEDULES)}, not {chosen!r}; give a budget for it, such "
            "as --keep-flops 0.5."
        )
    suffix = "" if chosen == (usual or BUDGET_SCHEDULE) or chosen is None else f"@{chosen}"
    suffix += "" if chosen_repair == repair else f"+{chosen_repair}"
    return Combination(str(criterion), chosen_repair, chosen, suffix)


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
        "at": list(study.at),
        "settings": {name: list(v) if isinstance(v, tuple) else v for name, v in study.settings.items()},
    }
