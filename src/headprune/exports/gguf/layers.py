"""The layers of a GGUF file: their head counts and widths, and placeholders for layers that llama.cpp does not support.

llama.cpp's architecture `deci` is for models whose layers differ. It has two limits, which were found by experiment: a
first layer with 0 heads does not load, and a layer without FFN is skipped together with its attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.units import resolve

# A layer without neurons gets this many zero ones, whose output is exactly zero; rows of q8_0 and q4_0 consist of
# blocks of this size.
BLOCK = 32

# attention: heads as they are; none: no tensors; silent: no keys and values, and an output projection of zeros;
# constant: one head of zeros, whose output projection may have a bias.
Form = Literal["attention", "none", "silent", "constant"]


@dataclass(frozen=True)
class Layer:
    """One layer of the file: its module in the model, and the three numbers that llama.cpp reads for it."""

    module: nn.Module
    form: Form
    heads: int
    kv_heads: int
    neurons: int  # of the model
    width: int  # of the file: neurons, padded with zeros


def head_size(model: PreTrainedModel) -> int:
    """Columns of one head, the same in all layers."""
    return resolve(model)[0].head_dim


def layers_of(model: Any, *, quantize: str | None = None) -> list[Layer]:
    """The layers to write. Layers without attention, FFN and biases are left out, but for one, because llama.cpp reads
    the size of heads from the first."""
    modules = [module for module in model.model.layers if not _is_identity(module)] or [model.model.layers[0]]
    size = head_size(model)
    layers = [_layer(module, size, padded=bool(quantize)) for module in modules]
    if layers[0].form == "none":
        # llama.cpp requires heads in the first layer, and keys in some layer.
        if any(layer.kv_heads for layer in layers):
            layers[0] = replace(layers[0], form="silent", heads=model.config.num_attention_heads)
        else:
            layers[0] = replace(layers[0], form="constant", heads=1, kv_heads=1)
    return layers


def weight(module: nn.Module, path: str) -> torch.Tensor | None:
    """A tensor inside a module, or None where it does not exist or is empty."""
    owner, _, name = path.rpartition(".")
    try:
        tensor = getattr(module.get_submodule(owner), name, None)
    except AttributeError:
        return None
    return tensor.detach() if isinstance(tensor, torch.Tensor) and tensor.numel() else None


def _layer(module: nn.Module, size: int, *, padded: bool) -> Layer:
    heads, kv_heads = (_rows(module, f"self_attn.{name}_proj.weight") // size for name in "qk")
    neurons = _rows(module, "mlp.gate_proj.weight")
    form: Form = "attention" if heads else "none"
    if not heads and _has_bias(module, "self_attn.o_proj.bias"):
        form, heads, kv_heads = "constant", 1, 1
    width = -(-neurons // BLOCK) * BLOCK if padded else neurons
    return Layer(module, form, heads, kv_heads, neurons, width or BLOCK)


def _rows(module: nn.Module, path: str) -> int:
    tensor = weight(module, path)
    return 0 if tensor is None else tensor.shape[0]


def _has_bias(module: nn.Module, path: str) -> bool:
    tensor = weight(module, path)
    return tensor is not None and bool(tensor.any())


def _is_identity(module: nn.Module) -> bool:
    empty = not _rows(module, "self_attn.q_proj.weight") and not _rows(module, "mlp.gate_proj.weight")
    return empty and not _has_bias(module, "self_attn.o_proj.bias") and not _has_bias(module, "mlp.down_proj.bias")
