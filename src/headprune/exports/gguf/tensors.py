"""The tensors of a GGUF file: names, rows in the order of its RoPE, zeros as placeholders, and number formats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from headprune.exports.gguf import rope
from headprune.exports.gguf.layers import BLOCK, Layer, head_size, weight

NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
TABLES = ("token_embd.weight", "output.weight")


def tensors_of(model: Any, layers: list[Layer]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and values of every tensor, in float32, as llama.cpp's `deci` reads them."""
    size, hidden = head_size(model), model.config.hidden_size
    table, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    yield "token_embd.weight", table.float()
    if head.data_ptr() != table.data_ptr():  # a file without it uses the embeddings
        yield "output.weight", head.float()
    yield "output_norm.weight", model.model.norm.weight.detach().float()
    factors = rope.factors(model, size)
    if factors is not None:
        yield "rope_freqs.weight", factors
    for number, layer in enumerate(layers):
        parts = {**_attention(layer, size, hidden, rope.scaling(model)), **_feed_forward(layer, hidden)}
        for name, values in parts.items():
            yield f"blk.{number}.{name}", values.float().contiguous()


def format_of(name: str, shape: Sequence[int], quantize: str | None) -> Any:
    """The number format of a tensor: float32 without quantisation, and for vectors."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    if quantize is None or len(shape) == 1:
        return kinds.F32
    if shape[-1] % BLOCK:  # rows consist of blocks
        return kinds.F16
    # Embeddings and the output layer are rounded less, as in llama.cpp's quantisation.
    return kinds.Q8_0 if name in TABLES else getattr(kinds, quantize.upper())


def encode(values: torch.Tensor, kind: Any) -> np.ndarray:
    """The bytes of a tensor in its format."""
    import gguf

    return gguf.quants.quantize(values.numpy(), kind)


def interleave_rotary(values: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of queries or keys, reordered: transformers rotates entry i of a head with entry i + size / 2, llama.cpp
    adjacent entries."""
    return values.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).flatten(0, 2)


def _attention(layer: Layer, size: int, hidden: int, scaling: float) -> dict[str, torch.Tensor]:
    if layer.form == "none":
        return {}
    tensors = {"attn_norm.weight": _norm(layer, "attn_norm")}
    if layer.form == "silent":
        return {**tensors, "attn_output.weight": torch.zeros(hidden, hidden)}
    if layer.form == "constant":
        tensors |= {f"attn_{name}.weight": torch.zeros(size, hidden) for name in "qkv"}
        tensors["attn_output.weight"] = torch.zeros(hidden, size)
    for name, path in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "o_proj")):
        for kind in ("weight", "bias"):
            values = weight(layer.module, f"self_attn.{path}.{kind}")
            if values is None:
                continue
            if name == "q":
                values = values.float() * scaling
            tensors[f"attn_{name}.{kind}"] = interleave_rotary(values, size) if name in ("q", "k") else values
    return tensors


def _feed_forward(layer: Layer, hidden: int) -> dict[str, torch.Tensor]:
    tensors = {"ffn_norm.weight": _norm(layer, "ffn_norm")}
    for name in ("gate", "up", "down"):
        for kind in ("weight", "bias"):
            values = weight(layer.module, f"mlp.{name}_proj.{kind}")
            if name != "down" and values is not None:
                values = _pad(values, 0, layer.width)
            elif kind == "weight":
                shape = (hidden, 0) if name == "down" else (0, hidden)
                values = _pad(torch.zeros(shape) if values is None else values, int(name == "down"), layer.width)
            if values is not None:
                tensors[f"ffn_{name}.{kind}"] = values
    return tensors


def _pad(values: torch.Tensor, dim: int, width: int) -> torch.Tensor:
    """Pad with zeros after the neurons, up to this width."""
    missing = list(values.shape)
    missing[dim] = width - values.shape[dim]
    return torch.cat([values, values.new_zeros(missing)], dim)


def _norm(layer: Layer, name: str) -> torch.Tensor:
    tensor = weight(layer.module, f"{NORMS[name]}.weight")
    assert tensor is not None, "every layer has its norms"
    return tensor
