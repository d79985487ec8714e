"""Fluctuation: FLAP's score, the part of a unit's output that a constant cannot replace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.criteria.column_criteria import ColumnCriterion
from headprune.criteria.registry import criterion

if TYPE_CHECKING:
    import torch

    from headprune.signals.column_statistics import Columns


@criterion(
    "fluctuation",
    reference="FLAP, arXiv 2312.11983",
    use="with repair='mean' and widths='threshold', as FLAP does; forward passes only",
    schedule="one-shot",
)
@dataclass(frozen=True)
class Fluctuation(ColumnCriterion):
    """Var(x) * |w|^2 of every input column of the output map, x its input and w its weights.

    With `standardize` the columns of a site have mean 0 and deviation 1, so that sites can be compared by one
    threshold, and a unit has the mean of its columns; without, their sum.
    """

    standardize: bool = False

    def of_columns(self, weight: torch.Tensor, statistics: Columns) -> torch.Tensor:
        values = weight.square().sum(0) * statistics.variance
        if not self.standardize:
            return values
        spread = values.std() if len(values) > 1 else values.new_zeros(())
        return (values - values.mean()) / spread if spread > 0 else values * 0

    def of_members(self, columns: torch.Tensor) -> torch.Tensor:
        return columns.mean(-1) if self.standardize else columns.sum(-1)
