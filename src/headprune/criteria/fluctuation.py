"""Fluctuation: FLAP's score, how much of a unit's output a constant cannot stand in for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.criteria.columns import ColumnCriterion
from headprune.criteria.registry import criterion

if TYPE_CHECKING:
    import torch

    from headprune.signals.columns import Columns


@criterion(
    "fluctuation",
    reference="FLAP, arXiv 2312.11983",
    use="with repair='mean' and widths='threshold', as FLAP does; forward passes only",
)
@dataclass(frozen=True)
class Fluctuation(ColumnCriterion):
    """Var(x) * |w|^2 of every input column of the output map, x what it is given and w its weights.

    With `standardize` the columns of a site have mean 0 and deviation 1, so that sites can be compared by one
    threshold, and a unit has the mean of its columns; without, their sum.
    """

    standardize: bool = False

    def of_columns(self, weight: torch.Tensor, seen: Columns) -> torch.Tensor:
        own = weight.square().sum(0) * seen.variance
        if not self.standardize:
            return own
        spread = own.std() if len(own) > 1 else own.new_zeros(())
        return (own - own.mean()) / spread if spread > 0 else own * 0

    def of_members(self, columns: torch.Tensor) -> torch.Tensor:
        return columns.mean(-1) if self.standardize else columns.sum(-1)
