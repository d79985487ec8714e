"""Wanda-sp: weights times the size of their inputs, summed over a unit's columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.criteria.column_criteria import ColumnCriterion
from headprune.criteria.registry import criterion

if TYPE_CHECKING:
    import torch

    from headprune.signals.column_statistics import Columns


@criterion(
    "wanda",
    reference="Wanda, arXiv 2306.11695, structured as in FLAP, arXiv 2312.11983 (Wanda-sp)",
    use="a cheap baseline for language models, the same share at every site; forward passes only",
    schedule="one-shot",
)
@dataclass(frozen=True)
class Wanda(ColumnCriterion):
    """Sum over a unit's columns of the output map of |w|_1 * sqrt(E x^2), x the input of the column."""

    def of_columns(self, weight: torch.Tensor, statistics: Columns) -> torch.Tensor:
        return weight.abs().sum(0) * statistics.mean_square.sqrt()
