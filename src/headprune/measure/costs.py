"""Parameters and FLOPs of a model: of its modules, and of one unit of each site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.hooks.module_paths import layer_path
from headprune.measure.dummy_inputs import default_tokens, example_inputs, image_tokens, sample_shapes
from headprune.measure.flop_count import MAPS, FlopCount, count
from headprune.units import Kind, Site

BYTES_PER_PARAMETER = 4  # as in the published tables: MB = 4 bytes per parameter / 2^20
MEBIBYTE = 2**20


def megabytes(parameters: int) -> float:
    return parameters * BYTES_PER_PARAMETER / MEBIBYTE


def total_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def parameters_by_module(model: PreTrainedModel) -> dict[str, int]:
    """Parameters of each part of the model: the children of its base model, then its heads; tied ones count once."""
    base = model.base_model
    parts = [] if base is model else [(name, child) for name, child in model.named_children() if child is not base]
    parts = [*base.named_children(), *parts]
    counted: set[int] = set()
    counts: dict[str, int] = {}
    for name, child in parts:
        parameters = [parameter for parameter in child.parameters() if id(parameter) not in counted]
        counted.update(id(parameter) for parameter in parameters)
        if parameters:
            counts[name] = sum(parameter.numel() for parameter in parameters)
    rest = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in counted)
    return {**counts, "other": rest} if rest else counts


def head_parameters(model: PreTrainedModel, site: Site) -> int:
    """Parameters that leave with all units of this site: projections and their biases, and the columns of the output
    map, whose bias stays."""
    return unit_parameters(model, [site])[0] * (site.size // site.group)


def unit_parameters(model: PreTrainedModel, sites: Sequence[Site]) -> list[int]:
    """Parameters that leave with one unit of each site; 0 where none is left."""
    return [sum(count for _, count in _unit_tensors(model, site)) for site in sites]


def unit_bytes(model: PreTrainedModel, sites: Sequence[Site]) -> list[int]:
    """The memory of these parameters, in the precision that the weights have."""
    return [sum(count * tensor.element_size() for tensor, count in _unit_tensors(model, site)) for site in sites]


def _unit_tensors(model: PreTrainedModel, site: Site) -> Iterator[tuple[torch.Tensor, int]]:
    """The parameters with entries of units, and how many entries of each belong to one unit."""
    axes = {axis.tensor: axis for axis in site.axes if site.kept and _is_parameter(model, axis.tensor)}
    for name, axis in axes.items():
        parameter = model.get_parameter(name)
        yield parameter, parameter.numel() // axis.length * axis.width


def _is_parameter(model: nn.Module, name: str) -> bool:
    path, _, attribute = name.rpartition(".")
    return attribute in model.get_submodule(path)._parameters


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward pass of one sequence; a multiplication and an addition are two."""

    tokens: int
    kinds: dict[Kind, int]  # FLOPs of the units of all sites of a kind
    total: int

    @property
    def heads(self) -> int:
        return self.kinds.get("heads", 0)

    @property
    def neurons(self) -> int:
        return self.kinds.get("neurons", 0)

    @property
    def units_total(self) -> int:
        """FLOPs of all units: of layers all of whose maps belong to sites, everything in them."""
        return sum(self.kinds.values())

    @property
    def head_share(self) -> float:
        return self.heads / self.total if self.total else 0.0


def flops(
    model: PreTrainedModel,
    sites: Sequence[Site],
    *,
    tokens: int | None = None,
    batch: Mapping[str, Any] | None = None,
) -> Flops:
    """Count the matrix products of one sequence, image or recording: of `tokens` tokens, or like a sample of `batch`.

    The model runs once on fake tensors under torch's FlopCounterMode; where its forward needs values, FLOPs are
    estimated from the shapes of the weights. Norms, activations and embedding look-ups are not counted.
    """
    counted = _count_flops(model, sites, tokens, batch)
    kinds: dict[Kind, int] = {}
    for cost, site in zip(counted.units, sites, strict=True):
        kinds[site.kind] = kinds.get(site.kind, 0) + cost * (site.size // site.group)
    return Flops(counted.tokens, kinds, counted.rest + sum(kinds.values()))


def unit_costs(
    model: PreTrainedModel,
    sites: Sequence[Site],
    *,
    tokens: int | None = None,
    batch: Mapping[str, Any] | None = None,
) -> list[int]:
    """FLOPs that leave with one unit of each site, in all applications of it; 0 where none is left."""
    counted = _count_flops(model, sites, tokens, batch)
    return [cost if site.kept else 0 for cost, site in zip(counted.units, sites, strict=True)]


def _count_flops(
    model: PreTrainedModel, sites: Sequence[Site], tokens: int | None, batch: Mapping[str, Any] | None
) -> FlopCount:
    choices = example_inputs(model, tokens) if batch is None else sample_shapes(model, batch)
    counted = count(model, sites, choices)
    if counted is not None:
        return counted
    if tokens is None and batch is not None and isinstance(batch.get("input_ids"), torch.Tensor):
        tokens = int(batch["input_ids"].shape[1])
    return _estimate_from_weights(model, sites, default_tokens(model) if tokens is None else tokens)


def _estimate_from_weights(model: PreTrainedModel, sites: Sequence[Site], tokens: int) -> FlopCount:
    """Layers with a site run on every token, as does a projection to the vocabulary; other maps (a pooler, a
    classifier) run once."""
    units: list[int] = []
    layers: dict[str, int] = {}
    counted: set[str] = set()
    for site in sites:
        length = image_tokens(model) if site.stack == "vision" else None
        length = tokens if length is None else length
        layers[layer_path(site.path) + "."] = site.applications * length
        paths = maps_of_units(site)
        counted |= paths
        weights = sum(model.get_submodule(path).weight.numel() for path in paths)
        attention = 0
        if site.attention:
            attention = 2 * length * (length + learned_keys(model, site)) * site.size * site.width
        flops_of_site = site.applications * 2 * (length * weights + attention)
        units.append(flops_of_site // max(site.size // site.group, 1))
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    rest = 0
    for path, module in model.named_modules():
        if path in counted or not isinstance(module, MAPS):
            continue
        weight = module.weight
        rows = next((rows for layer, rows in layers.items() if path.startswith(layer)), 0)
        if not rows:
            every_token = vocabulary in weight.shape or not isinstance(module, nn.Linear)
            rows = tokens if every_token else 1
        rest += 2 * weight.numel() * rows
    return FlopCount(tokens, tuple(units), rest)


def learned_keys(model: PreTrainedModel, site: Site) -> int:
    """The number of keys that each head has learned, beside those of the tokens."""
    return model.get_parameter(site.memory[0]).shape[1] if site.memory else 0


def maps_of_units(site: Site) -> set[str]:
    """Paths of the linear maps that have rows or columns of units; none where no unit is left."""
    return {*site.maps, site.o} if site.kept else set()
