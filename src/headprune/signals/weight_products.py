"""First-order effect of removing each head's Q, K and V weights: <W, dL/dW>, from activations alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headprune.signals.calls import Call, ProjectionMeter, by_query_head
from headprune.signals.spec import GradientRequest, Meter, View
from headprune.units import AttentionSite, Projection


@dataclass(frozen=True)
class WeightProducts(GradientRequest):
    """<W, dL/dW> summed over each head's Q, K and V weights, one per sample."""

    def meter(self, view: View) -> Meter:
        return _ProductMeter(self, view)


class _ProductMeter(ProjectionMeter):
    keep_outputs = True

    def __init__(self, request: GradientRequest, view: View) -> None:
        super().__init__(request, view)
        self.products = view.blank(size=1 if request.aggregation == "batch" else None)

    def contract(self, site: AttentionSite, roles: list[Projection], calls: list[Call]) -> None:
        for call in calls:
            assert call.delta is not None
            assert call.outputs is not None
            for projection in roles:
                # <W, dW> = sum_t delta_t . (W x_t), and W x_t is the output without its bias.
                values = projection.of(call.outputs).float()
                bias: torch.Tensor | None = self.view.model.get_submodule(projection.module).bias  # type: ignore[assignment]
                values = values if bias is None else values - projection.of(bias).float()
                products = (values * projection.of(call.delta).float()).sum(dim=(1, 3))
                own = by_query_head(site, projection, products)
                self.products[:, site.index, list(site.kept)] += own.to(self.products)

    def answer(self) -> torch.Tensor:
        return self.products
