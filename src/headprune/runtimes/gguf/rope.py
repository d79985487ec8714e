"""The frequencies of rotary positions, as factors of the plain ones: what every fixed way of scaling them comes to."""

from __future__ import annotations

from typing import Any

import torch

# Those whose frequencies do not depend on the length of a text.
FIXED = ("default", "linear", "llama3", "yarn")


def rope_type(model: Any) -> str:
    return str((model.config.rope_parameters or {}).get("rope_type", "default"))


def base(model: Any) -> float:
    return float(model.config.rope_parameters["rope_theta"])


def factors(model: Any, size: int) -> torch.Tensor | None:
    """What llama.cpp divides each frequency by; None where it is 1 throughout."""
    used = model.model.rotary_emb.inv_freq.double()
    plain = base(model) ** (-torch.arange(0, size, 2, dtype=torch.double) / size)
    found = plain / used
    return None if torch.allclose(found, torch.ones_like(found), rtol=1e-5) else found.float()


def scaling(model: Any) -> float:
    """What queries and keys are multiplied with (YaRN does so); llama.cpp gets it within the weights of the queries."""
    return float(model.model.rotary_emb.attention_scaling) ** 2
