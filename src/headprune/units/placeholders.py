"""Placeholders for removed modules, and the reshaping of tensors.

As quirks.py, this file depends on torch alone: portable checkpoints carry it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ConfigView:
    """The config of one site: with its head counts, everything else read from the shared config."""

    def __init__(self, base: Any, overrides: dict[str, Any]) -> None:
        self._base = base
        self._overrides = overrides

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` read attributes before __init__ has run; they must not recurse.
        if name in ("_base", "_overrides") or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return self._overrides[name] if name in self._overrides else getattr(self._base, name)


class Bias(nn.Module):
    """The output projection of a site without units: no matrix is left, the bias stays."""

    weight = None  # forward code may read its dtype
    headprune_bias = headprune_placeholder = True

    def __init__(self, features: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features = features
        self.bias = bias

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        shape = (*inputs.shape[:-1], self.out_features)
        return inputs.new_zeros(shape) if self.bias is None else self.bias.expand(shape)

    def extra_repr(self) -> str:
        return f"out_features={self.out_features}, bias={self.bias is not None}"


class Nothing(nn.Module):
    """A projection of a feed-forward layer without neurons: its outputs have no columns."""

    weight = bias = None
    headprune_placeholder = True

    def forward(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return inputs[..., :0]


def is_bias(module: nn.Module) -> bool:
    """Whether this is the output projection of a site without units. A portable checkpoint has its own copy of
    these classes, so an attribute decides and not the class."""
    return hasattr(module, "headprune_bias")


def is_placeholder(module: nn.Module) -> bool:
    """Whether a removal put this module in the place of another."""
    return hasattr(module, "headprune_placeholder")


class Zeros(nn.Module):
    """A projection of a site that runs without heads: it returns zeros."""

    headprune_placeholder = True

    def __init__(self, features: int) -> None:
        super().__init__()
        self.out_features = features

    def forward(self, inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return inputs.new_zeros(*inputs.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"out_features={self.out_features}"


def reshape(model: nn.Module, path: str, shape: list[int]) -> None:
    """Give a parameter or buffer its final shape, and its module the matching attributes."""
    parent, _, name = path.rpartition(".")
    owner: Any = model.get_submodule(parent)
    tensor = getattr(owner, name)
    if is_bias(owner) or tensor is None:
        return
    if tuple(tensor.shape) != tuple(shape):
        smaller = tensor.new_empty(shape)
        is_parameter = isinstance(tensor, nn.Parameter)
        setattr(owner, name, nn.Parameter(smaller, requires_grad=tensor.requires_grad) if is_parameter else smaller)
    if name != "weight":
        return
    if isinstance(owner, nn.Linear):
        owner.out_features, owner.in_features = shape
    elif hasattr(owner, "nf") and hasattr(owner, "nx"):  # GPT-2's Conv1D
        owner.nx, owner.nf = shape
    elif isinstance(owner, nn.Embedding):
        owner.num_embeddings, owner.embedding_dim = shape
    elif isinstance(owner, nn.LayerNorm):
        owner.normalized_shape = tuple(shape)
    elif isinstance(owner, nn.modules.conv._ConvNd):
        owner.out_channels = shape[0]
        if owner.groups > 1 and shape[1] == 1:  # a depthwise convolution
            owner.groups = owner.in_channels = shape[0]


def mark_containers(model: nn.Module, path: str) -> None:
    """Keep initialisers of parent modules away from removed ones; modules without parameters need no initialisation."""
    while "." in path:
        path = path.rpartition(".")[0]
        parent_module: Any = model.get_submodule(path)
        if not parent_module._parameters and not parent_module._buffers:
            parent_module._is_hf_initialized = True


def only_bias(model: nn.Module, path: str) -> None:
    """Replace an output projection by its bias."""
    output: Any = model.get_submodule(path)
    if not is_bias(output):
        parent, _, name = path.rpartition(".")
        features = output.weight.shape[0] if isinstance(output, nn.Linear) else output.weight.shape[1]
        setattr(model.get_submodule(parent), name, Bias(int(features), output.bias))
