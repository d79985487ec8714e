"""Linear maps with weights in int8, with operations of torch alone, so that a program needs no other package."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from headprune.units.linear import is_transposed, out_features

LARGEST = 127


class Int8Linear(nn.Module):
    """Integer weights with one scale per output; products are computed in the precision of the input."""

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
        product = nn.functional.linear(states, self.weight.to(states.dtype)) * self.scale
        return product if self.bias is None else product + self.bias


def with_int8_weights(model: Any) -> Any:
    """A copy of the model with int8 weights. The output layer, which may be tied to the embedding, stays as it is."""
    result = copy.deepcopy(model)
    head = result.get_output_embeddings()
    replaced: dict[nn.Module, Int8Linear] = {}  # shared modules stay shared
    for module in list(result.modules()):
        for name, child in module.named_children():
            if _replaceable(child) and child is not head:
                replaced[child] = replaced.get(child) or Int8Linear(child)
                setattr(module, name, replaced[child])
    return result.eval()


def _replaceable(module: nn.Module) -> bool:
    """Whether it is a linear map that is called as a module; of subclasses some models only read the weights."""
    return (type(module) is nn.Linear or is_transposed(module)) and out_features(module) > 0
