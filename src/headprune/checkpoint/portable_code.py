"""Code that a portable checkpoint includes, with which plain transformers loads it.

As units/quirks.py, which it needs, this file is copied into the checkpoint: it depends on torch and transformers alone.
The config's entry `headprune` has

    layout, prefix   the plan for `restructure`, and the prefix of its paths for the base model
    dense            values in the config of the dense model
    instead          values in config.json in their place, so that no plain class loads the checkpoint as a dense one
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from headprune.units.quirks import restructure

# The base of these mixins is a config or a model of some family, which the type checker cannot know.
_Base: Any = object


class PrunedConfig(_Base):
    """The config of the dense model in memory, and the replaced values in the file."""

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        settings, others = super().get_config_dict(*args, **kwargs)
        return put(settings, settings.get("headprune", {}).get("dense", {})), others

    def to_json_file(self, json_file_path: Any, *args: Any, **kwargs: Any) -> None:
        super().to_json_file(json_file_path, *args, **kwargs)
        settings = put(json.loads(Path(json_file_path).read_text()), self.headprune["instead"])
        Path(json_file_path).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


class PrunedModel(_Base):
    """The dense class, built with the shapes of the pruned weights."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        restructure(self, fit_layout(self, config.headprune))

    @classmethod
    def is_custom_code(cls) -> bool:
        # Its weights have the names of the plain class, so transformers' renamings of that class apply.
        return False


def put(settings: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Settings with these values, by dotted names."""
    result = copy.deepcopy(settings)
    for name, value in values.items():
        *parts, last = name.split(".")
        node = result
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = value
    return result


def fit_layout(model: Any, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The layout with the paths of this class, which may have another head than the saved one, or none, or be a part of
    it."""
    if "layout" not in record:
        raise ValueError(
            "More units were removed from this model after its checkpoint was written, and it was saved without its "
            "new layout: load it with headprune.load, and save it with headprune.save."
        )
    has_head = isinstance(getattr(model, model.base_model_prefix or "-", None), nn.Module)
    prefix = f"{model.base_model_prefix}." if has_head else ""
    entries = []
    for entry in record["layout"]:
        for candidate in (_with_prefix(entry, record["prefix"], prefix), entry):
            if _has(model, candidate["path"]):
                entries.append(candidate)
                break
    return entries


def _with_prefix(entry: dict[str, Any], saved_prefix: str, prefix: str) -> dict[str, Any]:
    def name(path: str) -> str:
        return prefix + path.removeprefix(saved_prefix) if path.startswith(saved_prefix) else path

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
