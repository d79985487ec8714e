"""What a model holds and what it computes: parameters by module, and the share that attention heads have in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headprune.units import AttentionSite
from headprune.units.paths import layer_path

BYTES_PER_PARAMETER = 4  # as in the published tables: MB = 4 bytes per parameter / 2^20
MEBIBYTE = 2**20


def megabytes(parameters: int) -> float:
    return parameters * BYTES_PER_PARAMETER / MEBIBYTE


def total_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def parameters_by_module(model: PreTrainedModel) -> dict[str, int]:
    """Parameters of each part of the model: the children of its base model, then its own heads; tied ones count "
    "once."""
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
    paths = {projection.module for projection in site.projections}
    count = sum(parameter.numel() for path in paths for parameter in model.get_submodule(path).parameters())
    return count + model.get_submodule(site.o).weight.numel()


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one forward pass of one sequence; a multiplication and an addition are two."""

    tokens: int
    heads: int
    total: int

    @property
    def head_share(self) -> float:
        return self.heads / self.total if self.total else 0.0


def flops(model: PreTrainedModel, sites: Sequence[AttentionSite], *, tokens: int | None = None) -> Flops:
    """Count the matrix products: projections and attention of every site, and all other linear maps and convolutions.

    Layers with a site run on every token, as does a projection to the vocabulary; other maps (a pooler, a
    classifier) run once. Norms, activations and table look-ups are not counted.
    """
    tokens = default_tokens(model) if tokens is None else tokens
    heads = 0
    for site in sites:
        if site.kept:
            paths = {projection.module for projection in site.projections} | {site.o}
            weights = sum(model.get_submodule(path).weight.numel() for path in paths)
            attention = 2 * tokens * tokens * site.heads * site.head_dim
            heads += site.applications * 2 * (tokens * weights + attention)
    layers = {layer_path(site.path) + ".": site.applications for site in sites}
    counted = {projection.module for site in sites for projection in site.projections} | {site.o for site in sites}
    vocabulary = getattr(model.config.get_text_config(), "vocab_size", None)
    rest = 0
    for path, module in model.named_modules():
        if path in counted or not isinstance(module, (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d)):
            continue
        weight = module.weight
        applications = next((times for layer, times in layers.items() if path.startswith(layer)), 0)
        if applications:
            rest += applications * 2 * tokens * weight.numel()
        else:
            every_token = vocabulary in weight.shape or not isinstance(module, nn.Linear)
            rest += 2 * weight.numel() * (tokens if every_token else 1)
    return Flops(tokens, heads, heads + rest)


def default_tokens(model: PreTrainedModel) -> int:
    """A sequence length to count with: the patches of an image and its class token, or 128 tokens of text."""
    size, patch = getattr(model.config, "image_size", None), getattr(model.config, "patch_size", None)
    if isinstance(size, int) and isinstance(patch, int):
        return (size // patch) ** 2 + 1
    return 128
