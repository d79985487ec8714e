"""Gradients at gates: how an objective changes, to first order, when a member's output is scaled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from headprune.batches import widened
from headprune.hooks.attach import at_gradient
from headprune.signals.spec import GradientRequest, Meter, View, unit_sums
from headprune.units import Kind, Site


@dataclass(frozen=True)
class GateGradients(GradientRequest):
    """<Z, dL/dZ>: the gradient at a gate of value 1 on the output of each member, one per sample.

    With `together` there is one gate for what goes together, and each member has its gradient. With `token_mean` it is
    divided by the number of the sample's tokens at the site, padding not among them.
    """

    kinds: ClassVar[tuple[Kind, ...]] = ("heads", "neurons")
    together: bool = False
    token_mean: bool = False

    def meter(self, view: View) -> GateMeter:
        return GateMeter(self, view)


class GateMeter(Meter):
    def __init__(self, request: GradientRequest, view: View) -> None:
        super().__init__(request, view)
        self.products = view.blank()

    def output(self, site: Site, columns: torch.Tensor) -> None:
        values = self.view.per_sample(columns, site)

        def note(gradient: torch.Tensor) -> None:
            if self.is_current:
                self.read(site, values, self.view.per_sample(gradient, site))

        at_gradient(columns, note)

    def read(self, site: Site, values: torch.Tensor, gradient: torch.Tensor) -> None:
        products = site.split((widened(values) * widened(gradient)).sum(1)).sum(-1)
        # A unit is removed as a whole.
        if self.request.objective == "logit-signs" or getattr(self.request, "together", False):
            products = unit_sums(site, products)
        if getattr(self.request, "token_mean", False):
            products = products / self.view.token_counts(site, values.shape[1]).to(products.device)
        self.products[:, site.index, list(site.kept)] += products.to(self.products)

    def answer(self) -> torch.Tensor:
        return self.products
