"""Norms of the gradients of each head's Q, K and V weights, mostly without forming weight gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headprune.batches import widened
from headprune.signals.block_norms_math import gram_is_cheaper, gram_matrix, squared_block_norms
from headprune.signals.projection_gradients import Call, ProjectionMeter
from headprune.signals.spec import GradientRequest, Meter, Objective, View
from headprune.units import Axis, Site
from headprune.units.spec import ROLES

INDEX: dict[str, int] = {role: index for index, role in enumerate(ROLES)}


@dataclass(frozen=True)
class BlockNorms(GradientRequest):
    """Frobenius norms of the gradient of each head's Q, K and V weights: [3 x batch x sites x heads].

    With aggregation `batch` it is the gradient of one scalar for the whole batch, and the batch axis has length 1.
    """

    objective: Objective = "logit-norm"

    def meter(self, view: View) -> Meter:
        return _NormMeter(self, view)


class _NormMeter(ProjectionMeter):
    def __init__(self, request: GradientRequest, view: View) -> None:
        super().__init__(request, view)
        self.norms = view.blank(len(ROLES), size=1 if request.aggregation == "batch" else None)
        self._grams: dict[tuple[int, ...], torch.Tensor] = {}

    def contract(self, site: Site, roles: Mapping[str, Axis], calls: list[Call]) -> None:
        inputs = _joined([call.inputs for call in calls])
        deltas = _joined([call.delta for call in calls if call.delta is not None])
        rows = sum(axis.owned for axis in roles.values())
        gram = None
        if gram_is_cheaper(inputs.shape[1], inputs.shape[2], rows, 4 - len(roles)):
            gram = self._gram(calls, inputs)
        for role, axis in roles.items():
            blocks = axis.split(deltas).flatten(-2)
            norms = squared_block_norms(inputs, blocks, len(axis.units), gram).sqrt()
            part = self.norms[INDEX[role]]
            part[:, site.index, list(site.kept)] += site.by_member(axis, norms).to(part)

    def _gram(self, calls: list[Call], inputs: torch.Tensor) -> torch.Tensor:
        """The Gram matrix of the inputs, computed once for q, k and v where they have the same input."""
        key = (inputs.shape[0], *(call.inputs.data_ptr() for call in calls))
        if key not in self._grams:
            self._grams.clear()
            self._grams[key] = gram_matrix(inputs)
        return self._grams[key]

    def done(self, site: Site) -> None:
        self._grams.clear()

    def answer(self) -> torch.Tensor:
        return self.norms


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return widened(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))
