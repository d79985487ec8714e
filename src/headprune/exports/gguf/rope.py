"""RoPE scaling as factors of the default frequencies, for every type whose frequencies are fixed."""

from __future__ import annotations

from typing import Any

import torch

# Types whose frequencies do not depend on the length of a text.
FIXED = ("default", "linear", "llama3", "yarn")


def rope_type(model: Any) -> str:
    return str((model.config.rope_parameters or {}).get("rope_type", "default"))


def base(model: Any) -> float:
    return float(model.config.rope_parameters["rope_theta"])


def factors(model: Any, size: int) -> torch.Tensor | None:
    """The factors by which llama.cpp divides frequencies; None where all are 1."""
    used = model.model.rotary_emb.inv_freq.double()
    default = base(model) ** (-torch.arange(0, size, 2, dtype=torch.double) / size)
    result = default / used
    return None if torch.allclose(result, torch.ones_like(result), rtol=1e-5) else result.float()


def scaling(model: Any) -> float:
    """The factor of attention scores (of YaRN), which is multiplied into the weights of the queries."""
    return float(model.model.rotary_emb.attention_scaling) ** 2
