"""Reads configs of checkpoints without running code of the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headprune.units.cutting.record import with_numbers

TYPE_PREFIX = "headprune-"  # of the model_type of portable checkpoints, whose code has to be run


def read_config(path: str | Path) -> Any:
    """The config in a folder or on the hub. That of a portable checkpoint has a model_type for which plain
    transformers needs its code; here it becomes that of the dense model."""
    settings, _ = PreTrainedConfig.get_config_dict(path)
    dense = (settings.get("headprune") or {}).get("dense", {})
    if "model_type" not in dense:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    model_type = str(settings.get("model_type"))
    settings = with_numbers(settings, dense)
    if model_type not in (settings["model_type"], f"{TYPE_PREFIX}{settings['model_type']}"):
        raise ValueError(f"its model_type {model_type!r} is none that headprune wrote")
    return CONFIG_MAPPING[settings["model_type"]].from_dict(settings, name_or_path=str(path))


def stored_dtype(path: str | Path) -> torch.dtype | None:
    """The dtype of the weights of a checkpoint by its config."""
    return read_config(path).dtype


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
