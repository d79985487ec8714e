"""Criteria that score each input column of an output map by its inputs and its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headprune.criteria.registry import Criterion

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from headprune.signals import SiteRequest
    from headprune.signals.column_statistics import Columns
    from headprune.units import Site


class ColumnCriterion(Criterion):
    """A score of every column from one forward pass over the data; the score of a member follows from its columns."""

    def of_columns(self, weight: torch.Tensor, statistics: Columns) -> torch.Tensor:
        """The score of each column of the map [out x in]."""
        raise NotImplementedError

    def of_members(self, columns: torch.Tensor) -> torch.Tensor:
        """Scores of members from those of their columns [members x width]."""
        return columns.sum(-1)

    def site_request(self) -> SiteRequest:
        from headprune.signals.column_statistics import ColumnRequest

        return ColumnRequest()

    def score_site(self, model: PreTrainedModel, site: Site, gathered: Columns) -> torch.Tensor:
        from headprune.signals.column_statistics import output_weight

        return self.of_members(site.split(self.of_columns(output_weight(model, site), gathered)))
