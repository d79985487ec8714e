"""Linear maps whose weights are stored in int8, in operations of torch alone: a program needs no other package."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from headprune.units.linear import is_transposed, out_features

LARGEST = 127


class Int8Linear(nn.Module):
    """Weights as integers times one number per output; products are computed in the precision of what comes in."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, dense: Any) -> None:
        super().__init__()
        weight = (dense.weight.t() if is_transposed(dense) else dense.weight).detach()
        scale = weight.abs().amax(1).clamp_min(torch.finfo(weight.dtype).tiny) / LARGEST
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8).contiguous())
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if dense.bias is None else dense.bias.detach())

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        found = nn.functional.linear(states, self.weight.to(states.dtype)) * self.scale
        return found if self.bias is None else found + self.bias


def with_int8_weights(model: Any) -> Any:
    """A copy of the model. The map to the vocabulary, which is the embedding at times, stays as it is."""
    small = copy.deepcopy(model)
    head = small.get_output_embeddings()
    made: dict[nn.Module, Int8Linear] = {}  # what several places share stays shared
    for module in list(small.modules()):
        for name, child in module.named_children():
            if _replaceable(child) and child is not head:
                made[child] = made.get(child) or Int8Linear(child)
                setattr(module, name, made[child])
    return small.eval()


def _replaceable(module: nn.Module) -> bool:
    """What is called as a linear map, and not only asked for its weights as subclasses may be."""
    return (type(module) is nn.Linear or is_transposed(module)) and out_features(module) > 0
