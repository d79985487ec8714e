"""Wanda-sp: weights times the size of what they are given, added up over a unit's columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headprune.criteria.registry import KINDS, Criterion, criterion

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from headprune.task import Labels, Task
    from headprune.units import Site


@criterion(
    "wanda",
    reference="Wanda, arXiv 2306.11695, structured as in FLAP, arXiv 2312.11983 (Wanda-sp)",
    use="a cheap baseline for language models, the same share at every site; forward passes only",
)
@dataclass(frozen=True)
class Wanda(Criterion):
    """Sum over a unit's columns of the output map of |w|_1 * sqrt(E x^2), x what the column is given."""

    kinds = KINDS
    gathers = True

    @property
    def needs(self) -> list[str]:
        return ["data"]

    def from_data(
        self,
        model: PreTrainedModel,
        sites: Sequence[Site],
        batches: Sequence[Mapping[str, Any]],
        task: Task,
        labels: Labels,
    ) -> torch.Tensor:
        from headprune.signals.columns import gather_columns, output_weight
        from headprune.units import nan_scores

        scores = nan_scores(sites)
        found = gather_columns(model, sites, batches, task)
        for site in sites:
            if site.kept:
                own = output_weight(model, site).abs().sum(0)
                own = own * found[site.index].mean_square.sqrt() if site.index in found else own * 0
                scores[site.index, list(site.kept)] = site.split(own).sum(-1)
        return scores
