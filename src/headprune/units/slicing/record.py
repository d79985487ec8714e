"""The record of removed units: `pruned_heads` and `pruned_neurons` in the config of a transformers model, attributes of
any other module; by site, in original ids."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from transformers import PreTrainedModel

from headprune.units.module_facts import Facts, facts_and_shapes
from headprune.units.spec import Kind

Removed = dict[int, list[int]]
NAMES: dict[Kind, str] = {"heads": "pruned_heads", "neurons": "pruned_neurons"}
LARGEST = 1 << 24  # the largest number in a range: a damaged one must not fill the memory
# Attributes of modules that are no transformers models. A config that such a module has is that of a part of it.
DENSE_LAYOUT = "headprune_dense_layout"
ATTRIBUTES = {"heads": "headprune_removed", "neurons": "headprune_removed_neurons"}


def removed_members(model: nn.Module, kind: Kind) -> Removed:
    """site of this kind -> original ids that were removed there."""
    in_config = isinstance(model, PreTrainedModel)
    record = getattr(model.config, NAMES[kind], None) if in_config else getattr(model, ATTRIBUTES[kind], None)
    return {int(site): sorted(from_ranges(ids)) for site, ids in (record or {}).items()}


# Discovered layouts of dense modules that are no transformers models, by name, with what they were discovered on. When
# its first unit is removed, a module gets its layout as an attribute: then it could not be discovered again.
_dense_layouts: WeakKeyDictionary[nn.Module, tuple[Facts, dict[str, Any]]] = WeakKeyDictionary()


def dense_layout(model: nn.Module, name: str) -> Any:
    """What `keep_dense_layout` stored under this name for the module, or None."""
    return _layouts_of(model).get(name)


def keep_dense_layout(model: nn.Module, name: str, value: Any) -> None:
    _layouts_of(model)[name] = value


def _layouts_of(model: nn.Module) -> dict[str, Any]:
    """The layouts of a module; none where its parts have been exchanged since they were discovered."""
    if DENSE_LAYOUT in model.__dict__:
        return model.__dict__[DENSE_LAYOUT]
    facts = facts_and_shapes(model)
    if model not in _dense_layouts or _dense_layouts[model][0] != facts:
        _dense_layouts[model] = facts, {}
    return _dense_layouts[model][1]


def write_record(model: Any, kind: Kind, removed: Mapping[int, Sequence[int]]) -> None:
    """Thousands of neurons are written as ranges, heads one by one."""
    encode = sorted if kind == "heads" else to_ranges
    record = {str(site): encode(removed[site]) for site in sorted(removed) if kind == "heads" or removed[site]}
    if isinstance(model, PreTrainedModel):
        setattr(model.config, NAMES[kind], record)
        extras = getattr(model.config, "headprune", None) or {}
        if "layout" in extras:  # of the loaded checkpoint, which is not valid any more
            model.config.headprune = {name: value for name, value in extras.items() if name != "layout"}
    else:
        setattr(model, ATTRIBUTES[kind], record)
        model.__dict__.setdefault(DENSE_LAYOUT, _dense_layouts.get(model, ((), {}))[1])


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
    """The inverse of `to_ranges`; a list stays one. ValueError where the text is invalid."""
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


# --- numbers of the dense config, which a plain checkpoint keeps under `headprune.dense`
# -----------------------------------


def dense_numbers_of(config: Any) -> dict[str, Any]:
    """The numbers of the dense model in a plain checkpoint, whose config states smaller ones."""
    return dict((getattr(config, "headprune", None) or {}).get("dense", {}))


def entries(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All settings but records, those of nested configs by dotted names."""
    for name, value in settings.items():
        if isinstance(value, dict) and name.endswith("_config"):
            yield from entries(value, f"{prefix}{name}.")
        elif not name.startswith("_") and name not in NAMES.values():
            yield prefix + name, value


def number_of(settings: Any, name: str) -> Any:
    """The entry of this name, dotted inside a nested config; None where there is none."""
    for part in name.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings


def with_numbers(settings: Mapping[str, Any], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the settings with these numbers, by dotted names."""
    result = copy.deepcopy(dict(settings))
    for name, value in numbers.items():
        *parts, last = name.split(".")
        target = result
        for part in parts:
            target = target.setdefault(part, {})
        target[last] = value
    return result


def put_numbers(config: Any, numbers: Mapping[str, Any]) -> None:
    """The same for a config object, in place."""
    for name, value in numbers.items():
        *parts, last = name.split(".")
        target = config
        for part in parts:
            target = getattr(target, part)
        setattr(target, last, value)
