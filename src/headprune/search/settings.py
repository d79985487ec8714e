"""Settings as a run keeps them: those of earlier versions under today's names, and the command that they belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from headprune.errors import CriterionError, ScheduleError
from headprune.search.config import BUDGETS, VERB_DEFAULTS, Experiment, PruneConfig, current_repair


def command_words(settings: Mapping[str, Any], verb: str = "prune") -> list[str]:
    """The command that a run's settings belong to, without its --out; options at their defaults are left out."""
    settings = migrated(settings)
    words = ["headprune", verb, str(settings["model"]), "--data", str(settings["data"])]
    own = VERB_DEFAULTS.get(verb, {})
    implied = _implied(settings)
    for field in dataclasses.fields(Experiment):
        value = settings.get(field.name, field.default)
        if field.name in ("model", "data") or value is None or value == own.get(field.name, field.default):
            continue
        if verb == "compare" and (field.name == "criterion" or field.metadata["stops"]):
            continue  # which are asked for as --criteria, and run to the end
        flag = field.metadata.get("flag") or f"--{field.name.replace('_', '-')}"
        if field.name in IMPLIED and field.name not in own and value == implied.get(field.name):
            continue
        if value is True:
            words.append(flag)
        elif isinstance(value, (list, tuple)):
            if field.name in BUDGETS:
                words += [flag, ",".join(f"{point:g}" for point in value)]
            else:
                words += [word for entry in value for word in (flag, str(entry))]
        elif value is not False:
            words += [flag, str(value)]
    return words


# What other settings may decide.
IMPLIED = ("units", "schedule", "criterion", "repair", "widths", "rounds", "rescore")


def _implied(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What these settings would be if only the budget and the method had been given; how often to score depends on the
    criterion and the schedule too."""
    asked: dict[str, Any] = {name: settings.get(name) for name in (*BUDGETS, "method")}
    chosen: dict[str, Any] = {name: settings.get(name) for name in ("criterion", "schedule", "units")}
    try:
        return {**PruneConfig(**asked).settings(), "rescore": PruneConfig(**asked, **chosen).rescore}
    except (CriterionError, ScheduleError):  # a method of a plugin that is not there now
        return {}


def renamed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run of any kind and version, under the names that they have now."""
    result = dict(settings)
    if "compensate" in result:
        result["repair"] = current_repair(result.pop("compensate"), result)
    if result.get("schedule") == "sweep":
        result["schedule"] = "layerwise"
    return result


def migrated(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run of any version as this one writes them."""
    # Runs from before there was any repair had none, and all scored before every step.
    result = {"repair": "none", "rescore": "every", **renamed(settings)}
    for name, value in (result.pop("columns", None) or {}).items():
        result[f"{name}_column"] = value
    result["criterion"] = _full_name(result.get("criterion"))
    return result


def default_settings() -> dict[str, Any]:
    """What settings are that a run, of an earlier version, does not mention."""
    before = {"units": "heads", "schedule": "greedy", "rescore": "every", "widths": "global", "rounds": 6}
    return {**{f.name: f.default for f in dataclasses.fields(Experiment)}, **before}


def _full_name(criterion: Any) -> Any:
    """The name that a criterion has now."""
    from headprune.criteria import make

    try:
        return str(make(criterion))
    except CriterionError:  # a plugin's, which is not there now
        return criterion
