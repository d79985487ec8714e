"""Configs of checkpoints, read without running the code that comes with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headprune.units.cutting.record import with_numbers

TYPE = "headprune-"  # before the type of a model, where the code in its folder has to be run


def read_config(path: str | Path) -> Any:
    """The config in a folder or on the hub. That of a portable checkpoint names a type that makes plain transformers
    ask for its code; here it is that of the dense model."""
    settings, _ = PreTrainedConfig.get_config_dict(path)
    dense = (settings.get("headprune") or {}).get("dense", {})
    if "model_type" not in dense:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    given = str(settings.get("model_type"))
    settings = with_numbers(settings, dense)
    if given not in (settings["model_type"], f"{TYPE}{settings['model_type']}"):
        raise ValueError(f"its model_type {given!r} is none that headprune wrote")
    return CONFIG_MAPPING[settings["model_type"]].from_dict(settings, name_or_path=str(path))


def stored_dtype(path: str | Path) -> torch.dtype | None:
    """The precision that the weights of a checkpoint are in, as its config says."""
    return read_config(path).dtype


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
