"""Dummy inputs of modules that are no models, guessed from the names of their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import nn

from .config_patterns import HEAD_WIDTH
from .module_facts import BATCH, TOKENS, Facts

STATES = (
    "hidden_states",
    "x",
    "hidden_state",
    "query",
    "queries",
    "inputs_embeds",
    "inputs",
    "input",
    "embeddings",
    "features",
)


def block_inputs(facts: Facts) -> Iterator[dict[str, Any]]:
    names = facts.required()
    if not names:
        return
    choices = [list(guesses(name, facts, position)) for position, name in enumerate(names)]
    for values in product(*choices):
        yield dict(zip(names, values, strict=True))
    if "position_embeddings" in facts and "position_embeddings" not in names:
        for values in product(*choices, list(guesses("position_embeddings", facts, 1))):
            yield dict(zip([*names, "position_embeddings"], values, strict=True))


def widths(module: nn.Module) -> list[int]:
    """The input widths that a module may accept, most likely first."""
    sizes: dict[int, None] = {}
    for child in module.modules():
        weight = getattr(child, "weight", None)
        if isinstance(child, nn.Linear):
            sizes[child.in_features] = None
        elif isinstance(weight, torch.Tensor) and weight.dim() == 1:
            sizes[len(weight)] = None
    return list(sizes)[:3] or [8]


def guesses(name: str, facts: Facts, position: int) -> Iterator[Any]:
    if "mask" in name:
        yield None
        yield facts.ones(BATCH, TOKENS)
    elif name in ("position_embeddings", "rotary_pos_emb", "freqs_cis", "image_rotary_emb", "position_embedding"):
        for width in head_widths(facts):
            yield facts.floats(BATCH, TOKENS, width), facts.floats(BATCH, TOKENS, width)
            yield facts.floats(TOKENS, width), facts.floats(TOKENS, width)
    elif name == "cu_seqlens":
        yield torch.tensor([0, TOKENS, 2 * TOKENS], dtype=torch.int32, device=facts.device)
    elif name == "position_ids":
        yield torch.arange(TOKENS, device=facts.device).expand(BATCH, -1)
    elif position == 0 or "states" in name or name in (*STATES, "key", "value", "context", "latents", "memory"):
        for width in widths(facts.module):
            yield facts.floats(BATCH, TOKENS, width)
            if position == 0:
                yield facts.floats(BATCH * TOKENS, width)
                yield facts.floats(BATCH, 4, 4, width)
                yield facts.floats(BATCH, width, 4, 4)
    else:
        yield None


def head_widths(facts: Facts) -> list[int]:
    values = {value for name, value in vars(facts.module).items() if HEAD_WIDTH.search(name) and isinstance(value, int)}
    for node in facts.tree:
        values |= {value for name, value in node.ints() if HEAD_WIDTH.search(name)}
    return sorted(values)[:2] or [8]
