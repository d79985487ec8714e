"""What is written of each layer: its numbers in the weights, and the forms in which llama.cpp computes them right.

llama.cpp's architecture `deci` was made for models whose layers differ. Found by trying, and handled here:
a first layer with 0 heads does not load, and a layer without FFN is skipped together with its attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.units import resolve

# Where all neurons are gone, so many of zeros stand in: their output is exactly zero, and rows of q8_0 and q4_0 are
# made of blocks of this size.
BLOCK = 32

# attention: heads as they are; none: no tensors at all; silent: no keys and values, and an output projection of zeros;
# constant: one head of zeros, whose output projection may have a bias.
Form = Literal["attention", "none", "silent", "constant"]


@dataclass(frozen=True)
class Layer:
    """One layer of the file: where it is in the model, and the three numbers that llama.cpp reads for it."""

    module: nn.Module
    form: Form
    heads: int
    kv_heads: int
    neurons: int  # that the model has
    width: int  # that are written: neurons, and zeros up to here


def head_size(model: PreTrainedModel) -> int:
    """Columns of one head, alike in all layers."""
    return resolve(model)[0].head_dim


def layers_of(model: Any, *, quantize: str | None = None) -> list[Layer]:
    """The layers to write. One without attention, FFN and biases changes nothing, so it is left out; one always stays,
    because llama.cpp reads the size of heads from the first."""
    modules = [module for module in model.model.layers if not _changes_nothing(module)] or [model.model.layers[0]]
    size = head_size(model)
    found = [_layer(module, size, padded=bool(quantize)) for module in modules]
    if found[0].form == "none":
        # llama.cpp wants heads in the first layer, and keys somewhere.
        if any(layer.kv_heads for layer in found):
            found[0] = replace(found[0], form="silent", heads=model.config.num_attention_heads)
        else:
            found[0] = replace(found[0], form="constant", heads=1, kv_heads=1)
    return found


def weight(module: nn.Module, path: str) -> torch.Tensor | None:
    """A tensor below a module, or None where it is not there or has nothing in it."""
    owner, _, name = path.rpartition(".")
    try:
        found = getattr(module.get_submodule(owner), name, None)
    except AttributeError:
        return None
    return found.detach() if isinstance(found, torch.Tensor) and found.numel() else None


def _layer(module: nn.Module, size: int, *, padded: bool) -> Layer:
    heads, kv_heads = (_rows(module, f"self_attn.{name}_proj.weight") // size for name in "qk")
    neurons = _rows(module, "mlp.gate_proj.weight")
    form: Form = "attention" if heads else "none"
    if not heads and _bias(module, "self_attn.o_proj.bias"):
        form, heads, kv_heads = "constant", 1, 1
    width = -(-neurons // BLOCK) * BLOCK if padded else neurons
    return Layer(module, form, heads, kv_heads, neurons, width or BLOCK)


def _rows(module: nn.Module, path: str) -> int:
    found = weight(module, path)
    return 0 if found is None else found.shape[0]


def _bias(module: nn.Module, path: str) -> bool:
    found = weight(module, path)
    return found is not None and bool(found.any())


def _changes_nothing(module: nn.Module) -> bool:
    empty = not _rows(module, "self_attn.q_proj.weight") and not _rows(module, "mlp.gate_proj.weight")
    return empty and not _bias(module, "self_attn.o_proj.bias") and not _bias(module, "mlp.down_proj.bias")
