"""What a portable checkpoint does when plain transformers loads it.

As units/quirks.py, which it needs, this file is carried by the checkpoint itself: it depends on torch and transformers
alone. The config's entry `headprune` has

    layout, prefix   what `restructure` does, and the name that paths in it give to the model without its head
    dense            what the config of the dense model says
    instead          what config.json says in its place, so that no plain class takes the checkpoint for a dense one
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from headprune.units.quirks import restructure

# What these mixins' `super()` is, the classes below them say: a config and a model of some family.
_Above: Any = object


class PrunedConfig(_Above):
    """The config of the dense model in memory; what stands in its place in the file is put back there."""

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        settings, others = super().get_config_dict(*args, **kwargs)
        return put(settings, settings.get("headprune", {}).get("dense", {})), others

    def to_json_file(self, json_file_path: Any, *args: Any, **kwargs: Any) -> None:
        super().to_json_file(json_file_path, *args, **kwargs)
        settings = put(json.loads(Path(json_file_path).read_text()), self.headprune["instead"])
        Path(json_file_path).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


class PrunedModel(_Above):
    """The dense class, built with the shapes of the pruned weights."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        restructure(self, fitting(self, config.headprune))

    @classmethod
    def is_custom_code(cls) -> bool:
        # Its weights are named as those of the plain class, so transformers' renamings of that class apply.
        return False


def put(settings: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Settings with these values, whose names are dotted inside a part of them."""
    result = copy.deepcopy(settings)
    for name, value in values.items():
        *parts, last = name.split(".")
        place = result
        for part in parts:
            place = place.setdefault(part, {})
        place[last] = value
    return result


def fitting(model: Any, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The layout in the paths of this class, which may have another head than the one that was saved, or none, or be a
    part of it alone."""
    if "layout" not in record:
        raise ValueError(
            "More was removed from this model after its checkpoint was made, and it was saved without its new layout: "
            "load it with headprune.load, and save it with headprune.save."
        )
    head = isinstance(getattr(model, model.base_model_prefix or "-", None), nn.Module)
    own = f"{model.base_model_prefix}." if head else ""
    found = []
    for entry in record["layout"]:
        for moved in (_moved(entry, record["prefix"], own), entry):
            if _has(model, moved["path"]):
                found.append(moved)
                break
    return found


def _moved(entry: dict[str, Any], known: str, own: str) -> dict[str, Any]:
    def name(path: str) -> str:
        return own + path.removeprefix(known) if path.startswith(known) else path

    result = dict(entry)
    for key in ("path", "o"):
        result[key] = name(entry[key])
    for key in ("delete", "nothing"):
        if key in entry:
            result[key] = [name(path) for path in entry[key]]
    for key in ("tensors", "zeros"):
        if key in entry:
            result[key] = {name(path): value for path, value in entry[key].items()}
    return result


def _has(model: nn.Module, path: str) -> bool:
    try:
        model.get_submodule(path)
    except AttributeError:
        return False
    return True
