"""What the other heads of a site cannot express of a head's output, for all heads of a site at once.

With z the outputs of a site's heads, C their covariance (second moments where the output projection has no bias) and
P its inverse, the residual of the columns u after least squares on all others is (z - mean) P[:, u] P[u, u]^-1.
So one inverse per site serves every unit in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.hooks.watch import captured_outputs, watched
from headprune.signals.moments import Moments
from headprune.task.objectives import query_tokens
from headprune.units import AttentionSite
from headprune.units.linear import is_transposed
from headprune.units.paths import layer_path

RIDGE = 1e-3  # relative to the mean square of the outputs


@dataclass(frozen=True)
class ResidualMap:
    """Residuals of all units of one site: (z - mean) @ matrix."""

    mean: torch.Tensor  # [width], zero where the output projection has no bias
    matrix: torch.Tensor  # [width x width], a column of a unit for each of its outputs

    def of(self, outputs: torch.Tensor) -> torch.Tensor:
        outputs = outputs.float()
        return (outputs - self.mean.to(outputs)) @ self.matrix.to(outputs)


Residuals = Mapping[int, ResidualMap]  # by site


def residual_maps(
    model: PreTrainedModel, sites: Sequence[AttentionSite], moments: Mapping[int, Moments]
) -> dict[int, ResidualMap]:
    return {site.index: _fit(model, site, moments[site.index]) for site in sites if site.index in moments}


def _fit(model: PreTrainedModel, site: AttentionSite, moments: Moments) -> ResidualMap:
    output: Any = model.get_submodule(site.o)
    centred = output.bias is not None
    spread = moments.covariance() if centred else moments.second()
    if not torch.isfinite(spread).all():  # the pass that scores says in which batch, so nothing may spread from here
        return ResidualMap(torch.zeros_like(moments.mean), torch.eye(len(spread), dtype=spread.dtype))
    scale = spread.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
    precision = torch.linalg.inv(spread + RIDGE * scale * torch.eye(len(spread), dtype=spread.dtype))
    width = site.head_dim * site.group
    matrix = torch.zeros_like(precision)
    for start in range(0, len(precision), width):
        unit = slice(start, start + width)
        own = torch.linalg.inv(precision[unit, unit])
        matrix[:, unit] = precision[:, unit] @ own
    mean = moments.mean if centred else torch.zeros_like(moments.mean)
    return ResidualMap(mean, matrix)


class ErrorMeter:
    """How much of each unit's contribution nobody could take over, relative to the stream that it is added to."""

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[AttentionSite],
        residuals: Residuals,
        batch: Mapping[str, Any],
        size: int,
    ) -> None:
        self.model, self.sites, self.residuals, self.batch, self.size = model, sites, residuals, batch, size
        self.streams: dict[str, Any] = {}
        heads = max((site.original_heads for site in sites), default=0)
        self.errors = torch.zeros(size, len(sites), heads)
        for site in sites:
            gone = [head for head in range(heads) if head not in site.kept]
            self.errors[:, site.index, gone] = torch.nan

    @contextmanager
    def watching(self) -> Iterator[None]:
        layers = {layer_path(site.path): self.model.get_submodule(layer_path(site.path)) for site in self.sites}
        with watched(self.model, self.sites, output=self._see), captured_outputs(list(layers.items()), self.streams):
            yield

    def _see(self, site: AttentionSite, outputs: torch.Tensor) -> None:
        fitted = self.residuals.get(site.index)
        if fitted is None:
            return
        output: Any = self.model.get_submodule(site.o)
        weight = (output.weight if not is_transposed(output) else output.weight.t()).detach().float()
        residual = fitted.of(outputs.detach()).unflatten(-1, (site.heads // site.group, -1))
        blocks = weight.unflatten(-1, (site.heads // site.group, -1)).transpose(0, 1)  # [units x out x width]
        grams = blocks.transpose(1, 2) @ blocks
        squares = (torch.einsum("...uw,uwv->...uv", residual, grams) * residual).sum(-1)
        per_sample = self._per_sample(site, squares).repeat_interleave(site.group, dim=-1)
        self.errors[:, site.index, list(site.kept)] += per_sample.to(self.errors)

    def _per_sample(self, site: AttentionSite, values: torch.Tensor) -> torch.Tensor:
        """Sums over the real tokens of each sample, [batch x last axis]."""
        values = values.reshape(self.size, -1, values.shape[-1])
        mask = query_tokens(site, self.batch)
        if mask is not None and mask.shape == values.shape[:2]:
            values = values * mask.unsqueeze(-1).to(values)
        return values.sum(1)

    def answer(self) -> torch.Tensor:
        """[batch x sites x heads], NaN at heads that are gone."""
        scales = torch.ones(self.size, len(self.sites), 1)
        for site in self.sites:
            stream = self.streams.get(layer_path(site.path))
            stream = stream[0] if isinstance(stream, (tuple, list)) else stream
            if not isinstance(stream, torch.Tensor) or stream.shape[0] != self.size:
                return self.errors  # a model without such layers: all sites count as they are
            squares = stream.detach().float().square().sum(-1, keepdim=True)
            scales[:, site.index] = self._per_sample(site, squares).to(scales)
        return self.errors / scales.clamp_min(torch.finfo(scales.dtype).tiny)
