"""Linear maps as this package sees them: `nn.Linear` [out, in] and GPT-2's `Conv1D` [in, out] behind one face."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

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
