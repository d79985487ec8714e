"""Linear maps as this package sees them: `nn.Linear` [out, in] and GPT-2's `Conv1D` [in, out] behind one face."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from headprune.errors import UnsupportedModelError

PLAIN = (nn.Linear, Conv1D)


def is_plain(module: nn.Module) -> bool:
    """Linear, Conv1D, or what torch and a model's own code derive from Linear, which a proof finds to be one.

    A subclass from elsewhere (quantised, adapter) stores or computes something else.
    """
    kind = type(module)
    own = kind.__module__.startswith(("torch.nn.modules.", "transformers.models."))
    return kind in PLAIN or (isinstance(module, nn.Linear) and own)


def is_transposed(module: nn.Module) -> bool:
    return isinstance(module, Conv1D)


def out_features(module: Any) -> int:
    return int(module.weight.shape[1 if is_transposed(module) else 0])


def in_features(module: Any) -> int:
    return int(module.weight.shape[0 if is_transposed(module) else 1])


def is_quantized(tensor: Any) -> bool:
    """Whether this is a tensor of torchao: integers and scales that pass for floating point."""
    return type(tensor).__module__.partition(".")[0] == "torchao"


def refuse_quantized(model: nn.Module, what: str) -> None:
    """Integers cannot be taken apart, trained or quantised again, so that comes last."""
    if any(is_quantized(parameter) for parameter in model.parameters()):
        raise UnsupportedModelError(
            f"The weights of this model are quantised, so it cannot be {what}; do that before headprune.quantize."
        )
