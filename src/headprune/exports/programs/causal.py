"""The program of a causal language model: the KV cache of every layer is an input and an output."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from headprune.exports.programs.spec import (
    BATCH,
    CACHE,
    SEQUENCE,
    TOTAL,
    ModelProgram,
    Program,
    Programs,
    Tensors,
    named_layers,
    past_name,
)
from headprune.exports.runtime import Source
from headprune.hooks.outputs import largest_difference
from headprune.units.quirks import is_empty

TOKEN_INPUTS = {"input_ids", "attention_mask", "position_ids"}


class DecodeStep(ModelProgram):
    """New tokens after those in the KV cache. A layer without attention has no keys and values as inputs: its entry in
    the cache, whose length models read, gets a placeholder."""

    def __init__(self, model: Any, layers: int, attention_layers: Sequence[int]) -> None:
        super().__init__(model)
        self.layers, self.attention_layers = layers, list(attention_layers)

    def forward(self, inputs: Tensors) -> Tensors:
        cache = fill_cache(inputs, self.layers, self.attention_layers)
        tokens = {name: inputs[name] for name in TOKEN_INPUTS if name in inputs}
        output = self.model(**tokens, past_key_values=cache, use_cache=True)
        return {"logits": output.logits, **named_layers(cache, self.attention_layers)}


def fill_cache(inputs: Tensors, layers: int, attention_layers: Sequence[int], side: str = "") -> DynamicCache:
    cache = DynamicCache()
    for layer in range(layers):
        if layer in attention_layers:
            pair = [inputs[past_name(layer, part, side)] for part in ("key", "value")]
        else:
            pair = 2 * [_placeholder(inputs, attention_layers, side)]
        cache.update(*pair, layer)
    return cache


def _placeholder(inputs: Tensors, attention_layers: Sequence[int], side: str) -> torch.Tensor:
    """A placeholder of the same length as the other layers' keys, and of one head and one channel."""
    return inputs[past_name(attention_layers[0], "key", side)][:, :1, :, :1]


def causal_programs(source: Source) -> Programs | None:
    """None for a model whose cache has more than keys and values, or whose outputs differ with it."""
    model, batch = source.model, source.batch
    ids = batch.get("input_ids")
    if ids is None or ids.shape[1] < 2 or set(_input_names(source)) - TOKEN_INPUTS:
        return None
    mask = batch.get("attention_mask", torch.ones_like(ids))
    try:
        return _build_programs(source, ids, mask)
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError, NotImplementedError):
        return None  # other states than keys and values, or another class of cache
    finally:
        model.eval()


def _build_programs(source: Source, ids: torch.Tensor, mask: torch.Tensor) -> Programs | None:
    model = source.model
    half = ids.shape[1] // 2
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        cache = DynamicCache()
        model(input_ids=ids[:, :half], attention_mask=mask[:, :half], past_key_values=cache, use_cache=True)
    layers = len(cache.layers)
    attention_layers = [layer for layer in range(layers) if layer not in empty_layers(model)]
    if not attention_layers:
        return None  # nothing to cache
    axes = {"input_ids": {0: BATCH, 1: SEQUENCE}, "attention_mask": {0: BATCH, 1: TOTAL}}
    inputs = {"input_ids": ids[:, half:].contiguous(), "attention_mask": mask}
    for layer in attention_layers:
        for part in ("key", "value"):
            inputs[past_name(layer, part)] = getattr(cache.layers[layer], f"{part}s").contiguous()
            axes[past_name(layer, part)] = CACHE
    positions = torch.arange(half, ids.shape[1]).expand(len(ids), -1).contiguous()
    module = DecodeStep(model, layers, attention_layers)
    for positions_input in (
        {"position_ids": positions},
        {},
    ):  # with explicit positions, else those that the model counts
        if positions_input and "position_ids" not in inspect.signature(model.forward).parameters:
            continue
        program = Program(
            "model",
            module,
            {**inputs, **positions_input},
            {**axes, **{name: {0: BATCH, 1: SEQUENCE} for name in positions_input}},
        )
        if _agree(expected[:, half:], program.outputs()["logits"], mask[:, half:]):
            return Programs("causal", (program,))
    return None


def _agree(expected: torch.Tensor, actual: torch.Tensor, mask: torch.Tensor) -> bool:
    worst, allowed = largest_difference([expected[mask.bool()]], [actual[mask.bool()]])
    return worst <= allowed


def _input_names(source: Source) -> list[str]:
    return [name for name, value in source.task.inputs(source.batch).items() if isinstance(value, torch.Tensor)]


def empty_layers(decoder: nn.Module, *, cross: bool = False) -> set[int]:
    """The layers, by index in the cache, whose sites have no heads left."""
    empty: list[Any] = [module for module in decoder.modules() if is_empty(module)]
    return {site._layer for site in empty if bool(site.headprune_empty["cross"]) == cross and hasattr(site, "_layer")}
