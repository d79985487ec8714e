"""Settings in run.json: migrated from earlier versions, and converted to the command of the run."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from headprune.config.groups import BUDGETS, COMPARE_DEFAULTS
from headprune.config.option import options_of
from headprune.errors import CriterionError, ScheduleError
from headprune.search.config import Experiment, PruneConfig, current_repair, stop_settings


def command_words(settings: Mapping[str, Any], verb: str = "prune") -> list[str]:
    """The command with a run's settings, without its --out; options at their defaults are left out."""
    settings = migrated(settings)
    words = ["headprune", verb, str(settings["model"]), "--data", str(settings["data"])]
    verb_defaults = COMPARE_DEFAULTS if verb == "compare" else {}
    # A comparison names its criteria with --criteria, and runs to the end.
    not_options = ("model", "data", *(("criterion", *stop_settings()) if verb == "compare" else ()))
    implied = _implied(settings)
    for option in options_of(Experiment):
        name, flag = option.field, option.flag
        value = settings.get(name, option.default)
        if name in not_options or value is None or value == verb_defaults.get(name, option.default):
            continue
        if name in IMPLIED and name not in verb_defaults and value == implied.get(name):
            continue
        if value is True:
            words.append(flag)
        elif isinstance(value, (list, tuple)):
            if name in BUDGETS:
                words += [flag, ",".join(f"{point:g}" for point in value)]
            else:
                words += [word for entry in value for word in (flag, str(entry))]
        elif value is not False:
            words += [flag, str(value)]
    return words


# Settings whose defaults depend on others.
IMPLIED = ("units", "schedule", "criterion", "repair", "widths", "rounds", "rescore")


def _implied(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of these settings for the budget and the method; that of rescore depends on the criterion and the
    schedule too."""
    budgets: dict[str, Any] = {name: settings.get(name) for name in (*BUDGETS, "method")}
    chosen: dict[str, Any] = {name: settings.get(name) for name in ("criterion", "schedule", "units")}
    try:
        return {**PruneConfig(**budgets).settings(), "rescore": PruneConfig(**budgets, **chosen).rescore}
    except (CriterionError, ScheduleError):  # a method of a plugin that is not imported now
        return {}


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run of any kind and version, under their current names."""
    result = dict(settings)
    if "compensate" in result:
        result["repair"] = current_repair(result.pop("compensate"), result)
    if result.get("schedule") == "sweep":
        result["schedule"] = "layerwise"
    return result


def migrated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run of any version as the current one writes them."""
    # The first versions had no repair, and scored before every step.
    result = {"repair": "none", "rescore": "every", **renamed(settings)}
    for name, value in (result.pop("columns", None) or {}).items():
        result[f"{name}_column"] = value
    return result | _criterion(result.get("criterion"), result.pop("criterion_revision", 1))


def default_settings() -> dict[str, Any]:
    """The values of settings that are missing in runs of earlier versions."""
    before = {"units": "heads", "schedule": "greedy", "rescore": "every", "widths": "global", "rounds": 6}
    samples = {"calibration_samples": 128}
    return {**{f.name: f.default for f in dataclasses.fields(Experiment)}, **before, **samples}


def _criterion(name: Any, revision: int) -> dict[str, Any]:
    """The current full name of a criterion, which may have meant another score in an earlier revision."""
    from headprune.criteria import make

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # earlier versions wrote earlier names
            current = make(name).as_of(revision)
    except CriterionError:  # of a plugin that is not imported now
        return {"criterion": name}
    own = {"criterion_revision": current.revision} if current.revision > 1 else {}
    return {"criterion": str(current), **own}
