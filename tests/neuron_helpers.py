"""What tests of feed-forward layers share: choosing neurons, gating them, and counting parameters by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from headprune.training.fixed_gates import gated
from headprune.units import Site, all_sites
from helpers import Tensors, flat, outputs
from zoo import Entry

Members = list[tuple[int, int]]


def layers_of(model: Any) -> list[Site]:
    return [site for site in all_sites(model) if site.kind == "neurons"]


def heads_of(model: Any) -> list[Any]:
    return [site for site in all_sites(model) if site.kind != "neurons"]


def kept_units(model: Any) -> list[tuple[int, ...]]:
    return [site.kept for site in all_sites(model)]


def gates_of(sites: Sequence[Site], members: Members) -> torch.Tensor:
    gates = torch.ones(len(sites), max(site.original for site in sites))
    for member in members:
        gates[member] = 0.0
    return gates


def silenced(model: Any, members: Members, batch: Mapping[str, Any]) -> Tensors:
    """What the dense model says with these members gated to zero."""
    sites = all_sites(model)
    with gated(model, gates_of(sites, members), sites=sites):
        return outputs(model, batch)


def allowed(reference: Tensors) -> float:
    """What rounding can explain: sums in another order, so many units in the last place of the largest number."""
    return max(
        256 * torch.finfo(tensor.dtype).eps * max(1.0, float(tensor.abs().max())) for tensor in reference.values()
    )


# --- which neurons go ------------------------------------------------------------------------------------------------


def scattered(model: Any, seed: int = 0) -> Members:
    """Some of every layer, as many as chance will have, and never all."""
    rng = random.Random(seed)
    layers = layers_of(model)
    return [(site.index, neuron) for site in layers for neuron in rng.sample(site.kept, rng.randrange(1, site.size))]


def neighbours(model: Any) -> Members:
    """A group in the middle of every layer."""
    return [(site.index, neuron) for site in layers_of(model) for neuron in site.kept[site.size // 4 : site.size // 2]]


def first_layer(model: Any) -> Members:
    return [(site.index, neuron) for site in layers_of(model)[:1] for neuron in site.kept]


def with_heads(model: Any) -> Members:
    """The first layer and the last attention as a whole, some neurons of the other layers, a unit of the first site."""
    layers, attention = layers_of(model), heads_of(model)
    heads = flat(attention[-1].units())
    if len(attention) > 1 and len(attention[0].units()) > 1:
        heads += flat(attention[0].units()[:1])
    return heads + first_layer(model) + [(site.index, neuron) for site in layers[1:] for neuron in site.kept[1::3]]


CHOICES: dict[str, Callable[[Any], Members]] = {
    "scattered": scattered,
    "neighbours": neighbours,
    "first-layer": first_layer,
    "with-heads": with_heads,
}


def evenly(model: Any, number: int = 6) -> Members:
    """The same number from every layer, but other ones each time."""
    return [
        (site.index, neuron)
        for site in layers_of(model)
        for neuron in random.Random(site.index).sample(site.kept, number)
    ]


# --- parameters of one neuron, from the config alone -----------------------------------------------------------------


def pair(hidden: int) -> int:
    """A row and its bias, and a column; the bias of the output stays."""
    return 2 * hidden + 1


def pair_without_biases(hidden: int) -> int:
    return 2 * hidden


def gate(hidden: int) -> int:
    """A row of the gate, a row of what is gated, and a column, apart or fused."""
    return 3 * hidden


FORMS: dict[str, Callable[[int], int]] = {
    **dict.fromkeys(("llama", "llama-gqa", "llama-mqa", "mistral", "qwen2", "qwen3", "gemma2", "granite"), gate),
    **dict.fromkeys(("phi3", "modernbert", "mt5"), gate),
    "t5": pair_without_biases,
}


def neuron_parameters(entry: Entry, config: Any) -> int:
    hidden = 32 if entry.name == "gpt-neox" else 24
    return FORMS.get(entry.name, pair)(hidden)


def neuron_layers(entry: Entry, config: Any) -> tuple[int, int]:
    """How many feed-forward layers there are, and how wide; by hand."""
    wide = entry.name in ("gpt2", "gpt2-cross", "bloom", "dinov2")  # four times the hidden width
    name = entry.name
    if name == "albert":
        number = 1
    elif name in ("t5", "mt5", "bart", "marian", "whisper", "clip"):
        number = 4
    else:
        number = 2 if name in ("gpt2-cross", "clip-text", "clip-vision", "siglip-vision") else 3
    return number, 96 if wide else 20
