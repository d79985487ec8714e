"""What the other members of a site cannot express of a unit's output, for all units of a site at once.

With z what the output map is given, C its covariance (second moments where the output map has no bias) and P its
inverse, the residual of the columns u after least squares on all others is (z - mean) P[:, u] P[u, u]^-1. So one
inverse per site serves every unit in it; for neurons P[u, u] is a number.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from headprune.batches import widened
from headprune.hooks.offload import stored
from headprune.hooks.paths import layer_path
from headprune.hooks.watch import captured_outputs
from headprune.signals.gate_gradients import GateMeter
from headprune.signals.late import Late
from headprune.signals.moments import Moments
from headprune.signals.spec import Fit, GradientRequest, Meter, Objective, Request, View, is_expert
from headprune.units import Kind, Site
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
    if not torch.isfinite(spread).all():  # the pass that scores says in which batch, so nothing may spread from here
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
        own = torch.linalg.inv(precision[unit][:, unit])
        matrix[:, unit] = precision[:, unit] @ own
    return ResidualMap(mean, matrix.to(dtype))


def _inverse(spread: torch.Tensor) -> torch.Tensor:
    """Of a positive matrix, in half the time of a general one, which matters at thousands of columns."""
    factor, failed = torch.linalg.cholesky_ex(spread)
    return torch.linalg.inv(spread) if failed else torch.cholesky_inverse(factor, out=factor)


def residuals(view: View, site: Site, outputs: torch.Tensor) -> torch.Tensor | None:
    """The residuals of all units; None for a site that has seen no real token."""
    assert isinstance(view.fit, Fit)
    fitted: ResidualMap | None = view.fit.once(
        ("residuals", site.index),
        lambda moments: residual_map(view.model, site, moments[site.index]) if site.index in moments else None,
    )
    return None if fitted is None else fitted.of(outputs)


@dataclass(frozen=True)
class ResidualGradients(GradientRequest):
    """<R, dL/dZ>: as GateGradients, with R the part of each unit's output that the others at its site cannot express.

    R is linear in what all members give; how is fitted to all the data before the pass.
    """

    kinds: ClassVar[tuple[Kind, ...]] = ("heads", "neurons")
    fitted: ClassVar[bool] = True
    waits: ClassVar[bool] = True
    objective: Objective = "logit-signs"

    def meter(self, view: View) -> Meter:
        return _ResidualGateMeter(self, view)


class _ResidualGateMeter(GateMeter):
    """Where the fit comes late, what sites gave and the gradients there wait for it."""

    def __init__(self, request: GradientRequest, view: View) -> None:
        super().__init__(request, view)
        self.waiting: list[tuple[Site, torch.Tensor, torch.Tensor]] = []

    def output(self, site: Site, columns: torch.Tensor) -> None:
        super().output(site, columns)
        if isinstance(self.view.fit, Late):
            self.view.fit.take(site, self.view.batch, columns.detach())

    def read(self, site: Site, values: torch.Tensor, gradient: torch.Tensor) -> None:
        if isinstance(self.view.fit, Late):
            self.waiting.append((site, values, self.view.fit.keep(gradient)))
        else:
            super().read(site, values, gradient)
            if self.view.fit.ahead is not None:
                self.view.fit.ahead.keep(site, self.view.number, values, gradient)

    def settle(self) -> None:
        for site, values, gradient in self.waiting:
            self.read(site, values, gradient)
        self.waiting.clear()

    def values(self, site: Site, outputs: torch.Tensor) -> torch.Tensor:
        residual = residuals(self.view, site, outputs)
        return torch.zeros_like(widened(outputs)) if residual is None else residual


@dataclass(frozen=True)
class ResidualErrors(Request):
    """|W R|^2 over each sample's tokens, R as in ResidualGradients and W the unit's part of the output map, relative to
    |x|^2, x the residual stream after the site's layer."""

    kinds: ClassVar[tuple[Kind, ...]] = ("heads", "neurons")
    fitted: ClassVar[bool] = True

    def meter(self, view: View) -> Meter:
        return _ErrorMeter(self, view)


class _ErrorMeter(Meter):
    """How much of each unit's contribution nobody could take over, relative to the stream that it is added to."""

    def __init__(self, request: Request, view: View) -> None:
        super().__init__(request, view)
        self.streams: dict[str, Any] = {}
        self.errors = view.blank()

    def watching(self) -> AbstractContextManager[None]:
        layers = {
            layer_path(site.path): self.view.model.get_submodule(layer_path(site.path)) for site in self.view.sites
        }
        return captured_outputs(list(layers.items()), self.streams)

    def output(self, site: Site, columns: torch.Tensor) -> None:
        if is_expert(site):
            columns = self.view.per_sample(columns, site)
        residual = residuals(self.view, site, columns.detach())
        if residual is None:
            return
        output: Any = self.view.model.get_submodule(site.o)
        weight = stored(output).detach().to(residual.device)
        weight = weight.t() if is_transposed(output) else weight
        squares = _contributions(site, widened(weight), residual)
        per_sample = self._summed(site, squares).repeat_interleave(site.group, dim=-1)
        self.errors[:, site.index, list(site.kept)] += per_sample.to(self.errors)

    def _summed(self, site: Site, values: torch.Tensor) -> torch.Tensor:
        """Sums over the real tokens of each sample, [batch x last axis]."""
        values = values.reshape(self.view.size, values.shape[:-1].numel() // self.view.size, values.shape[-1])
        real = self.view.real(site, values.shape[1])
        return (values if real is None else values * real.unsqueeze(-1).to(values)).sum(1)

    def answer(self) -> torch.Tensor:
        scales = torch.ones(self.view.size, len(self.view.sites), 1)
        for site in self.view.sites:
            stream = self.streams.get(layer_path(site.path))
            stream = stream[0] if isinstance(stream, (tuple, list)) else stream
            rows = self.view.size * self.view.task.rows(self.view.batch)
            if not isinstance(stream, torch.Tensor) or stream.shape[0] != rows:
                return self.errors  # a model without such layers: all sites count as they are
            squares = widened(stream.detach()).square().sum(-1, keepdim=True)
            scales[:, site.index] = self._summed(site, squares).to(scales)
        return self.errors / scales.clamp_min(torch.finfo(scales.dtype).tiny)


def _contributions(site: Site, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """|W R|^2 of every unit, [.. x units], without forming W R, which is as wide as the model for each of them."""
    if site.width * site.group == 1:
        return site.split(residual).squeeze(-1).square() * site.split(weight).squeeze(-1).square().sum(0)
    units = site.size // site.group
    blocks = site.split(weight).unflatten(-2, (units, -1)).flatten(-2).transpose(0, 1)  # [units x out x width]
    grams = blocks.transpose(1, 2) @ blocks
    residual = site.split(residual).unflatten(-2, (units, -1)).flatten(-2)
    return (torch.einsum("...uw,uwv->...uv", residual, grams) * residual).sum(-1)
