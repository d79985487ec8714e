"""Options of `load` that go to from_pretrained: those that it sets itself, and those that may fail."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headprune.errors import CheckpointError

# Options of from_pretrained with the only value that `load` has for them, and what to do instead.
FIXED: dict[str, tuple[Any, str]] = {
    "config": (None, "the config of the checkpoint says what was removed; change model.config after loading"),
    "ignore_mismatched_sizes": (
        False,
        "weights of other shapes are refused; replace modules of the model after loading",
    ),
    "use_safetensors": (True, "pickles are refused; convert the weights to safetensors"),
    "output_loading_info": (False, "weights that are missing or left over are refused, so leave it out"),
}


# Options of from_pretrained that say how the weights are held and run, and may fail where the weights are right.
HOW = ("dtype", "torch_dtype", "attn_implementation", "device_map")


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for from_pretrained, without those that `load` sets itself; refuses other values of these."""
    for name in ("dtype", "torch_dtype"):
        dtype = options.get(name)
        known = dtype is None or dtype == "auto" or isinstance(dtype, (torch.dtype, dict))
        if not known and not (isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype)):
            raise CheckpointError(f"There is no {name} {dtype!r}; choose torch.float32, torch.bfloat16 or 'auto'.")
    for name, (value, instead) in FIXED.items():
        if options.get(name) not in (None, value):
            raise CheckpointError(f"headprune.load sets {name} itself: {instead}.")
    return {name: value for name, value in options.items() if name not in FIXED}


def not_loaded(folder: Path, options: Mapping[str, Any], error: Exception) -> CheckpointError:
    """The error of from_pretrained in a sentence, which does not blame the weights where an option may be the cause."""
    reason = " ".join(str(error).split())[:400]
    given = ", ".join(f"{name}={options[name]!r}" for name in HOW if options.get(name) is not None)
    if not given:
        return CheckpointError(f"The weights in {folder} do not fit its config.json: {reason}")
    return CheckpointError(
        f"{folder} cannot be loaded with {given}: {reason.rstrip('.')}; choose another value, or leave it out to see "
        "whether the weights fit the config.json."
    )
