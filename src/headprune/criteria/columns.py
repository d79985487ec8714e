"""Criteria that look at one input column of an output map at a time: what it is given, and its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headprune.criteria.registry import KINDS, Criterion

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from headprune.signals.columns import Columns
    from headprune.tasks import Labels, Task
    from headprune.units import Site


class ColumnCriterion(Criterion):
    """A score of every column from one forward pass over the data, and from those of its columns that of a member."""

    kinds = KINDS
    gathers = True

    @property
    def needs(self) -> list[str]:
        return ["data"]

    def of_columns(self, weight: torch.Tensor, seen: Columns | None) -> torch.Tensor:
        """The score of each column of the map [out x in]; nothing was `seen` where all tokens are padding."""
        raise NotImplementedError

    def of_members(self, columns: torch.Tensor) -> torch.Tensor:
        """From the scores of their columns [members x width]."""
        return columns.sum(-1)

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
                own = self.of_columns(output_weight(model, site), found.get(site.index))
                scores[site.index, list(site.kept)] = self.of_members(site.split(own))
        return scores
