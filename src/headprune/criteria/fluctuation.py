"""Fluctuation: FLAP's score, how much of a unit's output a constant cannot stand in for."""

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
    "fluctuation",
    reference="FLAP, arXiv 2312.11983",
    use="with compensate='mean' and widths='threshold', as FLAP does; forward passes only",
)
@dataclass(frozen=True)
class Fluctuation(Criterion):
    """Var(x) * |w|^2 of every input column of the output map, x what it is given and w its weights.

    With `standardize` the columns of a site have mean 0 and deviation 1, so that sites can be compared by one
    threshold, and a unit has the mean of its columns; without, their sum.
    """

    kinds = KINDS
    gathers = True

    standardize: bool = False

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
            if not site.kept:
                continue
            own = output_weight(model, site).square().sum(0)
            own = own * found[site.index].variance if site.index in found else own * 0
            if self.standardize:
                spread = own.std() if len(own) > 1 else own.new_zeros(())
                own = (own - own.mean()) / spread if spread > 0 else own * 0
            members = site.split(own)
            scores[site.index, list(site.kept)] = members.mean(-1) if self.standardize else members.sum(-1)
        return scores
