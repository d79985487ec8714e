"""Reads configs of checkpoints without running code of the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headprune.units.slicing.record import with_numbers

TYPE_PREFIX = "headprune-"  # of the model_type of portable checkpoints, whose code has to be run


def read_config(path: str | Path, config_class: Any = None) -> Any:
    """The config in a folder or on the hub. That of a portable checkpoint has a model_type for which plain
    transformers needs its code; here it becomes that of the dense model. `config_class` reads a model_type that
    transformers does not know."""
    settings, _ = PreTrainedConfig.get_config_dict(path)
    dense = (settings.get("headprune") or {}).get("dense", {})
    if "model_type" not in dense:
        if "model_type" in settings and settings["model_type"] not in CONFIG_MAPPING and "auto_map" not in settings:
            if config_class is not None:
                return config_class.from_pretrained(path)
            raise ValueError(
                f"transformers has no model_type {settings['model_type']!r}; pass the class of the model as model_class"
            )
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    model_type = str(settings.get("model_type"))
    settings = with_numbers(settings, dense)
    if model_type not in (settings["model_type"], f"{TYPE_PREFIX}{settings['model_type']}"):
        raise ValueError(f"its model_type {model_type!r} is none that headprune wrote")
    return CONFIG_MAPPING[settings["model_type"]].from_dict(settings, name_or_path=str(path))


def stored_dtype(path: str | Path) -> torch.dtype | None:
    """The dtype of the weights of a checkpoint by its config."""
    return read_config(path).dtype


def read_settings(folder: Path) -> dict[str, Any]:
    """The entries of a config.json as the config class takes them: JSON has no infinity, transformers writes a tag."""
    settings, _ = PreTrainedConfig.get_config_dict(folder)
    return settings


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    encoded = PreTrainedConfig._encode_special_floats(dict(settings))
    (folder / "config.json").write_text(json.dumps(encoded, indent=2, sort_keys=True) + "\n")
