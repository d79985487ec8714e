"""Linear maps: one interface to `nn.Linear` [out, in] and GPT-2's `Conv1D` [in, out]."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from headprune.errors import UnsupportedModelError

PLAIN = (nn.Linear, Conv1D)


def is_plain(module: nn.Module) -> bool:
    """Whether this is a Linear, a Conv1D, or a subclass of Linear in torch or transformers, which discovery verifies.

    Other subclasses (quantised, adapter) store or compute something else.
    """
    kind = type(module)
    subclass = kind.__module__.startswith(("torch.nn.modules.", "transformers.models."))
    return kind in PLAIN or (isinstance(module, nn.Linear) and subclass)


def is_transposed(module: nn.Module) -> bool:
    return isinstance(module, Conv1D)


def out_features(module: Any) -> int:
    return int(module.weight.shape[1 if is_transposed(module) else 0])


def in_features(module: Any) -> int:
    return int(module.weight.shape[0 if is_transposed(module) else 1])


def is_quantized(tensor: Any) -> bool:
    """Whether this is a tensor of torchao: integers and scales behind a floating-point interface."""
    return type(tensor).__module__.partition(".")[0] == "torchao"


def refuse_quantized(model: nn.Module, what: str) -> None:
    """Quantised weights cannot be sliced, trained or quantised again, so quantisation comes last."""
    if any(is_quantized(parameter) for parameter in model.parameters()):
        raise UnsupportedModelError(
            f"The weights of this model are quantised, so it cannot be {what}; do that before headprune.quantize."
        )
