"""What a model holds and what it computes: parameters by module, and the share that attention heads have in both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.measure.examples import default_tokens, example_inputs, image_tokens, like
from headprune.measure.operations import MAPS, count
from headprune.units import AttentionSite
from headprune.units.paths import layer_path

BYTES_PER_PARAMETER = 4  # as in the published tables: MB = 4 bytes per parameter / 2^20
MEBIBYTE = 2**20


def megabytes(parameters: int) -> float:
    return parameters * BYTES_PER_PARAMETER / MEBIBYTE


def total_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def parameters_by_module(model: PreTrainedModel) -> dict[str, int]:
    """Parameters of each part of the model: the children of its base model, then its own heads; tied ones count
    once."""
    base = model.base_model
    parts = [] if base is model else [(name, child) for name, child in model.named_children() if child is not base]
    parts = [*base.named_children(), *parts]
    seen: set[int] = set()
    counts: dict[str, int] = {}
    for name, child in parts:
        own = [parameter for parameter in child.parameters() if id(parameter) not in seen]
        seen.update(id(parameter) for parameter in own)
        if own:
            counts[name] = sum(parameter.numel() for parameter in own)
    rest = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in seen)
    return {**counts, "other": rest} if rest else counts


def head_parameters(model: PreTrainedModel, site: AttentionSite) -> int:
    """Parameters that leave with the heads of this site: projections and their biases, and the columns of the output
    projection, whose bias stays."""
    if not site.kept:
        return 0
    if site.axes:
        shares = {axis.tensor: (axis.owned, axis.length) for axis in site.axes if _is_parameter(model, axis.tensor)}
        return sum(model.get_parameter(name).numel() * own // of for name, (own, of) in shares.items())
    paths = {projection.module for projection in site.projections}
    count = sum(parameter.numel() for path in paths for parameter in model.get_submodule(path).parameters())
    return count + model.get_submodule(site.o).weight.numel()


def _is_parameter(model: nn.Module, name: str) -> bool:
    path, _, own = name.rpartition(".")
    return own in model.get_submodule(path)._parameters


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward pass of one sequence; a multiplication and an addition are two."""

    tokens: int
    heads: int
    total: int

    @property
    def head_share(self) -> float:
        return self.heads / self.total if self.total else 0.0


def flops(
    model: PreTrainedModel,
    sites: Sequence[AttentionSite],
    *,
    tokens: int | None = None,
    batch: Mapping[str, Any] | None = None,
) -> Flops:
    """Count the matrix products of one sequence, image or recording: of `tokens` tokens, or like a sample of `batch`.

    The model runs once without numbers, as torch's own counter sees it; where its forward needs numbers, the weights
    say how much there is to compute. Norms, activations and table look-ups are not counted.
    """
    choices = example_inputs(model, tokens) if batch is None else like(model, batch)
    counted = count(model, sites, choices)
    if counted is None:
        if tokens is None and batch is not None and isinstance(batch.get("input_ids"), torch.Tensor):
            tokens = int(batch["input_ids"].shape[1])
        return _by_weights(model, sites, default_tokens(model) if tokens is None else tokens)
    heads = sum(cost * site.kv_heads for cost, site in zip(counted.units, sites, strict=True) if site.kept)
    return Flops(counted.tokens, heads, counted.rest + heads)


def _by_weights(model: PreTrainedModel, sites: Sequence[AttentionSite], tokens: int) -> Flops:
    """Layers with a site run on every token, as does a projection to the vocabulary; other maps (a pooler, a
    classifier) run once."""
    heads = 0
    layers: dict[str, int] = {}
    for site in sites:
        length = image_tokens(model) if site.stack == "vision" else None
        length = tokens if length is None else length
        layers[layer_path(site.path) + "."] = site.applications * length
        if site.kept:
            paths = {projection.module for projection in site.projections} | {*site.maps, site.o}
            weights = sum(model.get_submodule(path).weight.numel() for path in paths)
            attention = 2 * length * length * site.heads * site.head_dim
            heads += site.applications * 2 * (length * weights + attention)
    counted = {projection.module for site in sites for projection in site.projections}
    counted |= {path for site in sites for path in (*site.maps, site.o)}
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
    return Flops(tokens, heads, heads + rest)
