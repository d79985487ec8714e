"""What was removed, as a model's config remembers it: `pruned_heads` and `pruned_neurons`, by site, in original ids."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from headprune.units.spec import Kind

Removed = dict[int, list[int]]
NAMES: dict[Kind, str] = {"heads": "pruned_heads", "neurons": "pruned_neurons"}
LARGEST = 1 << 24  # the last number that a range may name: a damaged one must not fill the memory
DENSE_LAYOUT = "headprune_dense_layout"  # an attribute of such modules
OWN = {"heads": "headprune_removed", "neurons": "headprune_removed_neurons"}  # of modules without a config


def removed_members(model: nn.Module, kind: Kind) -> Removed:
    """site of this kind -> original ids of what is gone there."""
    config = getattr(model, "config", None)
    record = getattr(model, OWN[kind], None) if config is None else getattr(config, NAMES[kind], None)
    return {int(site): sorted(from_ranges(ids)) for site, ids in (record or {}).items()}


# What is known of dense modules without a config, by name. A module gets it for good when its first unit goes: later it
# could not be found again.
_dense_layouts: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()


def dense_layout(model: nn.Module, name: str) -> Any:
    """What `keep_dense_layout` kept under this name for the module; None where nothing was."""
    return model.__dict__.get(DENSE_LAYOUT, _dense_layouts.get(model, {})).get(name)


def keep_dense_layout(model: nn.Module, name: str, value: Any) -> None:
    known = model.__dict__[DENSE_LAYOUT] if DENSE_LAYOUT in model.__dict__ else _dense_layouts.setdefault(model, {})
    known[name] = value


def write_record(model: Any, kind: Kind, removed: Mapping[int, Sequence[int]]) -> None:
    """Thousands of neurons are written as ranges, heads one by one."""
    shown = sorted if kind == "heads" else to_ranges
    record = {str(site): shown(removed[site]) for site in sorted(removed) if kind == "heads" or removed[site]}
    if hasattr(model, "config"):
        setattr(model.config, NAMES[kind], record)
        carried = getattr(model.config, "headprune", None) or {}
        if "layout" in carried:  # of the checkpoint that the model came from, and not what it is like now
            model.config.headprune = {name: value for name, value in carried.items() if name != "layout"}
    else:
        setattr(model, OWN[kind], record)
        if DENSE_LAYOUT not in model.__dict__:
            model.__dict__[DENSE_LAYOUT] = _dense_layouts.setdefault(model, {})


def to_ranges(ids: Sequence[int]) -> str:
    """ "0-3,7" for 0, 1, 2, 3 and 7."""
    parts: list[list[int]] = []
    for number in sorted(ids):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def from_ranges(ids: str | Sequence[int]) -> list[int]:
    """`to_ranges` undone; a list stays one. ValueError where the text is none of it."""
    if not isinstance(ids, str):
        return list(ids)
    result: list[int] = []
    for part in filter(None, ids.split(",")):
        first, dash, last = part.partition("-")
        start, end = int(first), int(last if dash else first)
        if not start <= end <= LARGEST:
            raise ValueError(part)
        result.extend(range(start, end + 1))
    return result


# --- numbers of the dense config, which a native one keeps under `headprune.dense` -----------------------------------


def dense_numbers_of(config: Any) -> dict[str, Any]:
    """What a native checkpoint, whose config states smaller numbers, says of the dense model."""
    return dict((getattr(config, "headprune", None) or {}).get("dense", {}))


def entries(settings: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """All settings but records, those of parts by dotted names."""
    for name, value in settings.items():
        if isinstance(value, dict) and name.endswith("_config"):
            yield from entries(value, f"{place}{name}.")
        elif not name.startswith("_") and name not in NAMES.values():
            yield place + name, value


def number_of(settings: Any, name: str) -> Any:
    """The entry of this name, dotted inside a part of the settings; None where there is none."""
    for part in name.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings


def with_numbers(settings: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the settings with these numbers, dotted inside a part of them."""
    result = copy.deepcopy(dict(settings))
    for name, value in numbers.items():
        *parts, last = name.split(".")
        place = result
        for part in parts:
            place = place.setdefault(part, {})
        place[last] = value
    return result


def put_numbers(config: Any, numbers: Mapping[str, Any]) -> None:
    """The same for a config object, in place."""
    for name, value in numbers.items():
        *parts, last = name.split(".")
        place = config
        for part in parts:
            place = getattr(place, part)
        setattr(place, last, value)
