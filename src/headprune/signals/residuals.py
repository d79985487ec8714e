"""The part of a unit's output that the other units of its site cannot express, for all units of a site at once.

With z the inputs of the output map, C their covariance (second moments where the output map has no bias) and P its
inverse, the residual of the columns u after least squares on all others is (z - mean) P[:, u] P[u, u]^-1. So one
inverse per site serves every unit in it; for neurons P[u, u] is a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.batches import widened
from headprune.hooks.offload import stored
from headprune.signals.moments import Moments
from headprune.signals.spec import unit_sums
from headprune.signals.tokens import Application, Tokens
from headprune.units import Site
from headprune.units.linear import is_transposed

RIDGE = 1e-3  # relative to the mean square of the outputs


@dataclass(frozen=True)
class ResidualMap:
    """Residuals of all units of one site: (z - mean) @ matrix."""

    mean: torch.Tensor  # [width], zero where the output map has no bias
    matrix: torch.Tensor  # [width x width], a column of a unit for each of its outputs

    def of(self, outputs: torch.Tensor) -> torch.Tensor:
        outputs = widened(outputs)
        return (outputs - self.mean.to(outputs)) @ self.matrix.to(outputs)


def residual_map(model: PreTrainedModel, site: Site, moments: Moments) -> ResidualMap:
    output: Any = model.get_submodule(site.o)
    centred = output.bias is not None
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)  # that of widened outputs
    spread = moments.covariance() if centred else moments.second()
    if not torch.isfinite(spread).all():  # the scoring pass names the batch, so nothing is raised here
        return ResidualMap(torch.zeros_like(moments.mean), torch.eye(len(spread), dtype=spread.dtype))
    scale = spread.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny)
    mean = moments.mean if centred else torch.zeros_like(moments.mean)
    if site.width * site.group == 1:
        spread.diagonal().add_(RIDGE * scale)
        precision = _inverse(spread)
        precision /= precision.diagonal().clone()
        return ResidualMap(mean, precision.to(dtype))
    precision = torch.linalg.inv(spread + RIDGE * scale * torch.eye(len(spread), dtype=spread.dtype))
    matrix = torch.zeros_like(precision)
    for start in range(0, site.size, site.group):
        unit = torch.tensor(site.columns(range(start, start + site.group)))
        inverse = torch.linalg.inv(precision[unit][:, unit])
        matrix[:, unit] = precision[:, unit] @ inverse
    return ResidualMap(mean, matrix.to(dtype))


def _inverse(spread: torch.Tensor) -> torch.Tensor:
    """The inverse of a positive definite matrix, in half the time of a general one."""
    factor, failed = torch.linalg.cholesky_ex(spread)
    return torch.linalg.inv(spread) if failed else torch.cholesky_inverse(factor, out=factor)


def residual_gradients(model: PreTrainedModel, site: Site, tokens: Tokens) -> torch.Tensor:
    """E [ <R, df/dZ>^2 ] over samples for every member, R the residual of its unit."""
    fitted = residual_map(model, site, tokens.moments())
    return squared_products(
        site, tokens, lambda application: fitted.of(application.inputs) * widened(gradient_of(application))
    )


def gradient_of(application: Application) -> torch.Tensor:
    return torch.zeros_like(application.inputs) if application.gradient is None else application.gradient


def squared_products(site: Site, tokens: Tokens, products: Callable[[Application], torch.Tensor]) -> torch.Tensor:
    """E [ p^2 ] over samples for every member, p the sum of products [tokens x in] over a sample's tokens and the
    columns of the member's unit, since a unit is removed as a whole."""

    def of_members(application: Application) -> torch.Tensor:
        return unit_sums(site, site.split(products(application)).sum(-1))

    return tokens.per_sample(of_members, site.size).square().mean(0)


def residual_errors(model: PreTrainedModel, site: Site, tokens: Tokens) -> torch.Tensor:
    """E [ |W R|^2 / |x|^2 ] over samples for every member, R the residual of its unit, W the unit's part of the output
    map, x the residual stream; |x| is 1 for models in which the output of a layer is not a hidden state."""
    fitted = residual_map(model, site, tokens.moments())
    output: Any = model.get_submodule(site.o)
    weight = stored(output).detach()
    weight = widened(weight.t() if is_transposed(output) else weight)

    def of_units(application: Application) -> torch.Tensor:
        residual = fitted.of(application.inputs)
        return _contributions(site, weight.to(residual.device), residual)

    errors = tokens.per_sample(of_units, site.size // site.group)
    if sum(map(len, tokens.streams.values())) == len(errors):  # known in every batch
        sizes = torch.cat([tokens.streams[first] for first in sorted(tokens.streams)]).double()
        errors /= sizes.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    return errors.mean(0).repeat_interleave(site.group)


def _contributions(site: Site, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """|W R|^2 of every unit, [.. x units], without forming W R, which is as wide as the model for each of them."""
    if site.width * site.group == 1:
        return site.split(residual).squeeze(-1).square() * site.split(weight).squeeze(-1).square().sum(0)
    units = site.size // site.group
    blocks = site.split(weight).unflatten(-2, (units, -1)).flatten(-2).transpose(0, 1)  # [units x out x width]
    grams = blocks.transpose(1, 2) @ blocks
    residual = site.split(residual).unflatten(-2, (units, -1)).flatten(-2)
    return (torch.einsum("...uw,uwv->...uv", residual, grams) * residual).sum(-1)
