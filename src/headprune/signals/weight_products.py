"""First-order effect of removing the weights that produce each member: <W, dL/dW>, from activations alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from headprune.batches import widened
from headprune.hooks.offload import stored
from headprune.signals.projection_gradients import Call, ProjectionMeter
from headprune.signals.spec import GradientRequest, Meter, View
from headprune.units import Axis, Kind, Site


@dataclass(frozen=True)
class WeightProducts(GradientRequest):
    """<W, dL/dW> summed over each head's Q, K and V weights, or a neuron's rows of the maps before it; per sample."""

    kinds: ClassVar[tuple[Kind, ...]] = ("heads", "neurons")

    def meter(self, view: View) -> Meter:
        return _ProductMeter(self, view)


class _ProductMeter(ProjectionMeter):
    keep_outputs = True

    def __init__(self, request: GradientRequest, view: View) -> None:
        super().__init__(request, view)
        self.products = view.blank(size=1 if request.aggregation == "batch" else None)

    def contract(self, site: Site, roles: Mapping[str, Axis], calls: list[Call]) -> None:
        for call in calls:
            assert call.delta is not None
            assert call.outputs is not None
            for axis in roles.values():
                # <W, dW> = sum_t delta_t . (W x_t), and W x_t is the output without its bias.
                values = widened(axis.split(call.outputs))
                bias: torch.Tensor | None = stored(self.view.model.get_submodule(axis.module), "bias")
                values = values if bias is None else values - widened(axis.split(bias.to(values.device)))
                products = (values * widened(axis.split(call.delta))).sum(dim=(1, 3))
                values = site.by_member(axis, products)
                self.products[:, site.index, list(site.kept)] += values.to(self.products)

    def answer(self) -> torch.Tensor:
        return self.products
