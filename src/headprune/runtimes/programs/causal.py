"""A model that writes text: what it remembers of earlier tokens goes in and comes out, layer by layer."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from headprune.hooks.outputs import largest_difference
from headprune.runtimes.programs.spec import (
    BATCH,
    CACHE,
    SEQUENCE,
    TOTAL,
    Program,
    Programs,
    Tensors,
    Whole,
    named_layers,
    past_name,
)
from headprune.runtimes.spec import Source
from headprune.units.quirks import is_empty

KNOWN = {"input_ids", "attention_mask", "position_ids"}


class Continued(Whole):
    """New tokens after those that the layers remember. A layer without attention remembers nothing: its place in the
    cache, which models ask for the number of tokens so far, is filled here and not from outside."""

    def __init__(self, model: Any, layers: int, attending: Sequence[int]) -> None:
        super().__init__(model)
        self.layers, self.attending = layers, list(attending)

    def forward(self, inputs: Tensors) -> Tensors:
        cache = filled(inputs, self.layers, self.attending)
        given = {name: inputs[name] for name in KNOWN if name in inputs}
        output = self.model(**given, past_key_values=cache, use_cache=True)
        return {"logits": output.logits, **named_layers(cache, self.attending)}


def filled(inputs: Tensors, layers: int, attending: Sequence[int], side: str = "") -> DynamicCache:
    cache = DynamicCache()
    for layer in range(layers):
        if layer in attending:
            pair = [inputs[past_name(layer, part, side)] for part in ("key", "value")]
        else:
            pair = 2 * [_mark(inputs, attending, side)]
        cache.update(*pair, layer)
    return cache


def _mark(inputs: Tensors, attending: Sequence[int], side: str) -> torch.Tensor:
    """As long as what the other layers remember, and as thin as can be."""
    return inputs[past_name(attending[0], "key", side)][:, :1, :, :1]


def causal_programs(source: Source) -> Programs | None:
    """None for a model that does not remember keys and values alone, or computes something else with them."""
    model, batch = source.model, source.batch
    ids = batch.get("input_ids")
    if ids is None or ids.shape[1] < 2 or set(_taken(source)) - KNOWN:
        return None
    mask = batch.get("attention_mask", torch.ones_like(ids))
    try:
        return _tried(source, ids, mask)
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError, NotImplementedError):
        return None  # other states than keys and values, or a cache of its own
    finally:
        model.eval()


def _tried(source: Source, ids: torch.Tensor, mask: torch.Tensor) -> Programs | None:
    model = source.model
    cut = ids.shape[1] // 2
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        cache = DynamicCache()
        model(input_ids=ids[:, :cut], attention_mask=mask[:, :cut], past_key_values=cache, use_cache=True)
    layers = len(cache.layers)
    attending = [layer for layer in range(layers) if layer not in empty_layers(model)]
    if not attending:
        return None  # there is nothing to remember
    axes = {"input_ids": {0: BATCH, 1: SEQUENCE}, "attention_mask": {0: BATCH, 1: TOTAL}}
    inputs = {"input_ids": ids[:, cut:].contiguous(), "attention_mask": mask}
    for layer in attending:
        for part in ("key", "value"):
            inputs[past_name(layer, part)] = getattr(cache.layers[layer], f"{part}s").contiguous()
            axes[past_name(layer, part)] = CACHE
    positions = torch.arange(cut, ids.shape[1]).expand(len(ids), -1).contiguous()
    module = Continued(model, layers, attending)
    for chosen in ({"position_ids": positions}, {}):  # where a model counts positions by itself, as it does
        if chosen and "position_ids" not in inspect.signature(model.forward).parameters:
            continue
        program = Program(
            "model", module, {**inputs, **chosen}, {**axes, **{name: {0: BATCH, 1: SEQUENCE} for name in chosen}}
        )
        if _agree(expected[:, cut:], program.outputs()["logits"], mask[:, cut:]):
            return Programs("causal", (program,))
    return None


def _agree(expected: torch.Tensor, found: torch.Tensor, mask: torch.Tensor) -> bool:
    worst, allowed = largest_difference([expected[mask.bool()]], [found[mask.bool()]])
    return worst <= allowed


def _taken(source: Source) -> list[str]:
    return [name for name, value in source.task.inputs(source.batch).items() if isinstance(value, torch.Tensor)]


def empty_layers(decoder: nn.Module, *, cross: bool = False) -> set[int]:
    """The places in a cache of sites that have no heads left."""
    empty: list[Any] = [module for module in decoder.modules() if is_empty(module)]
    return {site._layer for site in empty if bool(site.headprune_empty["cross"]) == cross and hasattr(site, "_layer")}
