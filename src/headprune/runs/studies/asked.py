"""What a study is asked for, in a file or by options; needs no torch, so that what is wrong is refused at once."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headprune.criteria.registry import split_names
from headprune.errors import SweepError
from headprune.search.config import BUDGETS, VERB_DEFAULTS, Experiment, current_names, stop_settings
from headprune.store.files import is_there

LISTS = ("models", "data", "pairs", "criteria", "seeds", "plugin", *BUDGETS)
# What the lists decide, what a comparison has no use for, and methods, which bring criteria of their own.
NOT_SHARED = ("criterion", "model", "data", "seed", "method", *BUDGETS, *stop_settings())
SHARED = {field.name: field for field in dataclasses.fields(Experiment) if field.name not in NOT_SHARED}
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list[str]: "a list of texts"}


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is run: every criterion on every subject, with every seed and every budget."""

    subjects: tuple[Mapping[str, Any], ...]  # each a model, data, and settings of their own
    criteria: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    budgets: tuple[Mapping[str, Any], ...] = ({},)  # each a setting of an experiment; empty for the whole curve
    trials: int = 1
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of all experiments

    @property
    def size(self) -> int:
        """How many comparisons it is made of."""
        return len(self.subjects) * len(self.seeds) * len(self.budgets)


def read_sweep(path: Path) -> dict[str, Any]:
    """What a sweep file asks for, under the names that `study_of` takes."""
    import yaml

    if not is_there(path, SweepError) or not path.is_file():
        raise SweepError(f"There is no sweep file {path}; check the path.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise SweepError(f"{path} is not valid YAML: {reason}.") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise SweepError(f"{path} must hold names and values, such as criteria: [gnorm, his].")
    asked = current_names({key.replace("-", "_"): value for key, value in content.items()})
    for name, value in asked.items():
        known = (*LISTS, "trials", "seed", *SHARED)
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}."
            raise SweepError(f"{path} has {name!r}, which is no option of a sweep; {hint}")
        asked[name] = _listed(name, value) if name in LISTS else value
    if "seed" in asked:
        if "seeds" in asked:
            raise SweepError(f"{path} has both seed and seeds; leave one of them out.")
        asked["seeds"] = [asked.pop("seed")]
    return asked


def study_of(asked: Mapping[str, Any]) -> Study:
    """A study from lists (models, data, pairs, criteria, seeds, budgets), trials, and settings of all experiments."""
    subjects = [_own("pairs", pair, ("model", "data")) for pair in asked.get("pairs") or ()]
    models = [_own("models", entry, ("model",)) for entry in asked.get("models") or ()]
    sources = [_own("data", entry, ("data",)) for entry in asked.get("data") or ()]
    if bool(models) != bool(sources) or not (subjects or models):
        missing = "data" if models else "a model"
        raise SweepError(f"Name {missing} as well: MODEL --data FILE, or models and data in a sweep file.")
    subjects += [{**model, **source} for model, source in itertools.product(models, sources)]
    _refuse_doubles("model with this data", subjects)
    criteria = tuple(map(str, asked.get("criteria") or ()))
    if not criteria:
        raise SweepError("Name at least one criterion to compare: --criteria, or criteria in a sweep file.")
    seeds = tuple(asked.get("seeds") or (0,))
    for seed in seeds:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise SweepError(f"A seed is a whole number, not {seed!r}.")
    _refuse_doubles("seed", seeds)
    budgets = [{name: value} for name in BUDGETS for value in asked.get(name) or ()]
    _refuse_doubles("budget", budgets)
    settings = {
        name: _checked(name, value)
        for name, value in {**VERB_DEFAULTS["compare"], **asked}.items()
        if name in SHARED and value is not None
    }
    own_units = [settings.get("units"), *(subject.get("units") for subject in subjects)]
    if not budgets and any("neurons" in str(units) for units in own_units):
        raise SweepError("Neurons are compared at a budget; give one, such as --keep-flops 0.5, or leave out --units.")
    trials = asked.get("trials", 1)
    if not isinstance(trials, int) or isinstance(trials, bool) or trials < 1:
        raise SweepError(f"trials is a whole number of at least 1, not {trials!r}.")
    return Study(
        subjects=tuple(subjects),
        criteria=criteria,
        seeds=seeds,
        budgets=tuple(budgets) or ({},),
        trials=trials,
        settings=settings,
    )


def parse_seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SweepError(f"--seeds takes whole numbers with commas, such as 0,1,2, not {text!r}.") from None


def _listed(name: str, value: Any) -> list[Any]:
    if name == "criteria" and isinstance(value, str):
        return split_names(value)
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _own(name: str, entry: Any, needed: Sequence[str]) -> dict[str, Any]:
    """An entry of a list as settings: a name alone, or a mapping with settings of its own."""
    if isinstance(entry, Mapping):
        found = current_names({str(key).replace("-", "_"): value for key, value in entry.items()})
    elif len(needed) == 1 and isinstance(entry, str):
        found = {needed[0]: entry}
    else:
        raise SweepError(f"An entry of {name} names {' and '.join(needed)}, but there is {entry!r}.")
    for key, value in found.items():
        if key not in (*needed, *SHARED):
            near = difflib.get_close_matches(key, (*needed, *SHARED), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(needed)} and options of experiments."
            raise SweepError(f"An entry of {name} has {key!r}, which is no option of it; {hint}")
        if key in needed and not isinstance(value, str):
            raise SweepError(f"{key} in {name} is a path or a name, not {value!r}.")
        if key in SHARED:
            found[key] = _checked(key, value)
    missing = [key for key in needed if key not in found]
    if missing:
        raise SweepError(f"An entry of {name} lacks its {missing[0]}: {entry!r}.")
    return found


def _checked(name: str, value: Any) -> Any:
    """A setting of the type that its option has on the command line."""
    about = SHARED[name].metadata
    kind = about["word"]
    if kind == list[str]:
        found = [value] if isinstance(value, str) else value
        fits = isinstance(found, (list, tuple)) and all(isinstance(part, str) for part in found)
        value = found
    else:
        fits = isinstance(value, (int, float) if kind is float else kind)
        fits = fits and (kind is bool or not isinstance(value, bool))
    if not fits and not (value is None and SHARED[name].default is None):
        raise SweepError(f"{name} is {WORDS.get(kind, 'something else')}, not {value!r}.")
    if about["minimum"] is not None and value is not None and value < about["minimum"]:
        raise SweepError(f"{name} must be at least {about['minimum']}, but it is {value}.")
    return value


def _refuse_doubles(what: str, values: Sequence[Any]) -> None:
    for place, value in enumerate(values):
        if value in values[:place]:
            said = ", ".join(f"{key} {part}" for key, part in value.items()) if isinstance(value, dict) else value
            raise SweepError(f"There is a {what} twice: {said}; leave one of them out.")
