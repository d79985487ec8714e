"""The description of a study, from a file or from options; needs no torch, so that errors appear at once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune.config.groups import BUDGETS, COMPARE_DEFAULTS, COMPARE_GROUPS
from headprune.config.option import options_of
from headprune.config.option_file import nearest, read_options, underscored
from headprune.criteria.registry import split_names
from headprune.defaults import COMPARED_AT
from headprune.errors import StudyError
from headprune.search.config import current_names

LISTS = ("models", "data", "pairs", "criteria", "seeds", "plugin", "at", *BUDGETS)
BY_LIST = ("model", "data", "seed")  # options that the lists set, run by run
SHARED = {
    option.field: option for group in COMPARE_GROUPS for option in options_of(group) if option.field not in BY_LIST
}
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list[str]: "a list of texts"}


@dataclass(frozen=True, kw_only=True)
class Study:
    """Every criterion on every subject (a model with data), with every seed and every budget."""

    subjects: tuple[Mapping[str, Any], ...]  # each a model, data, and settings for them
    criteria: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    budgets: tuple[Mapping[str, Any], ...] = ({},)  # each a setting of an experiment; empty for the whole curve
    trials: int = 1
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of all experiments
    at: tuple[float, ...] = COMPARED_AT  # shares of heads removed at which curves are compared

    @property
    def size(self) -> int:
        """The number of comparisons."""
        return len(self.subjects) * len(self.seeds) * len(self.budgets)


def read_study(path: Path) -> dict[str, Any]:
    """The options of a study file, under the names of `study_of`."""
    content = read_options(path, StudyError, kind="study file", example="criteria: [gnorm, his]")
    options = current_names(content)
    for name, value in options.items():
        known = (*LISTS, "trials", "seed", *SHARED)
        if name not in known:
            raise StudyError(f"{path} has {name!r}, which is not an option of a study; {nearest(name, known)}")
        options[name] = _as_list(name, value) if name in LISTS else value
    if "seed" in options:
        if "seeds" in options:
            raise StudyError(f"{path} has both seed and seeds; leave one of them out.")
        options["seeds"] = [options.pop("seed")]
    return options


def study_of(options: Mapping[str, Any]) -> Study:
    """A study from lists (models, data, pairs, criteria, seeds, budgets), trials, and settings of all experiments."""
    subjects = [_entry("pairs", pair, ("model", "data")) for pair in options.get("pairs") or ()]
    models = [_entry("models", entry, ("model",)) for entry in options.get("models") or ()]
    sources = [_entry("data", entry, ("data",)) for entry in options.get("data") or ()]
    if bool(models) != bool(sources) or not (subjects or models):
        missing = "data" if models else "a model"
        raise StudyError(f"Name {missing} as well: MODEL --data FILE, or models and data in a study file.")
    subjects += [{**model, **source} for model, source in itertools.product(models, sources)]
    _refuse_doubles("model with this data", subjects)
    criteria = tuple(map(str, options.get("criteria") or ()))
    if not criteria:
        raise StudyError("Name at least one criterion to compare: --criteria, or criteria in a study file.")
    seeds = tuple(options.get("seeds") or (0,))
    for seed in seeds:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise StudyError(f"A seed is a whole number, not {seed!r}.")
    _refuse_doubles("seed", seeds)
    budgets = [{name: value} for name in BUDGETS for value in options.get(name) or ()]
    _refuse_doubles("budget", budgets)
    settings = {
        name: _check_type(name, value)
        for name, value in {**COMPARE_DEFAULTS, **options}.items()
        if name in SHARED and value is not None
    }
    all_units = [settings.get("units"), *(subject.get("units") for subject in subjects)]
    if not budgets and any("neurons" in str(units) for units in all_units):
        raise StudyError("Neurons are compared at a budget; give one, such as --keep-flops 0.5, or leave out --units.")
    trials = options.get("trials", 1)
    if not isinstance(trials, int) or isinstance(trials, bool) or trials < 1:
        raise StudyError(f"trials is a whole number of at least 1, not {trials!r}.")
    return Study(
        subjects=tuple(subjects),
        criteria=criteria,
        seeds=seeds,
        budgets=tuple(budgets) or ({},),
        trials=trials,
        settings=settings,
        at=parse_shares(options.get("at")),
    )


def parse_shares(percentages: Any) -> tuple[float, ...]:
    """Shares from percentages: "10,20,30", or a list of numbers or texts."""
    if percentages is None:
        return COMPARED_AT
    parts = percentages if isinstance(percentages, (list, tuple)) else [percentages]
    words = [word for part in parts for word in str(part).split(",")]
    try:
        numbers = [float(word.strip().removesuffix("%")) for word in words]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number <= 100 for number in numbers):
        raise StudyError(
            f"--at takes percentages of heads removed, above 0 and at most 100, such as 10,20,30,50, not "
            f"{','.join(words)!r}."
        )
    return tuple(number / 100 for number in sorted(set(numbers)))


def parse_seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise StudyError(f"--seeds takes whole numbers with commas, such as 0,1,2, not {text!r}.") from None


def check_alpha_word(alpha: str | None, study: Study) -> None:
    """Refuse what a choice cannot be made for, before anything is loaded."""
    if alpha not in (None, "auto"):
        raise StudyError(f"--alpha takes only auto, not {alpha!r}; set a value in the name: hies(alpha=0.7).")
    if alpha is None:
        return
    if study.size > 1 or study.budgets[0]:
        raise StudyError("--alpha auto is for one comparison along curves: one model, data set and seed, no budget.")
    if study.settings.get("same_data"):
        raise StudyError("--alpha auto needs samples that are neither scored nor evaluated; leave out --same-data.")


def _as_list(name: str, value: Any) -> list[Any]:
    if name == "criteria" and isinstance(value, str):
        return split_names(value)
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _entry(name: str, entry: Any, needed: Sequence[str]) -> dict[str, Any]:
    """An entry of a list as settings: a name, or a mapping with further settings for it."""
    if isinstance(entry, Mapping):
        settings = current_names(underscored(f"an entry of {name}", entry, StudyError))
    elif len(needed) == 1 and isinstance(entry, str):
        settings = {needed[0]: entry}
    else:
        raise StudyError(f"An entry of {name} has to name {' and '.join(needed)}, not {entry!r}.")
    for key, value in settings.items():
        if key not in (*needed, *SHARED):
            raise StudyError(
                f"An entry of {name} has {key!r}, which is not an option of it; {nearest(key, (*needed, *SHARED))}"
            )
        if key in needed and not isinstance(value, str):
            raise StudyError(f"{key} in {name} is a path or a name, not {value!r}.")
        if key in SHARED:
            settings[key] = _check_type(key, value)
    missing = [key for key in needed if key not in settings]
    if missing:
        raise StudyError(f"An entry of {name} lacks its {missing[0]}: {entry!r}.")
    return settings


def _check_type(name: str, value: Any) -> Any:
    """The setting, checked against the type of its option."""
    option = SHARED[name]
    if option.type == list[str]:
        value = [value] if isinstance(value, str) else value
        fits = isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value)
    else:
        fits = isinstance(value, (int, float) if option.type is float else option.type)
        fits = fits and (option.type is bool or not isinstance(value, bool))
    if not fits and not (value is None and option.default is None):
        raise StudyError(f"{name} is {WORDS.get(option.type, 'something else')}, not {value!r}.")
    if option.minimum is not None and value is not None and value < option.minimum:
        raise StudyError(f"{name} must be at least {option.minimum}, but it is {value}.")
    return value


def _refuse_doubles(what: str, values: Sequence[Any]) -> None:
    for index, value in enumerate(values):
        if value in values[:index]:
            text = ", ".join(f"{key} {part}" for key, part in value.items()) if isinstance(value, dict) else value
            raise StudyError(f"There is a {what} twice: {text}; leave one of them out.")
