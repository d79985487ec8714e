"""Criteria that look at one input column of an output map at a time: what it is given, and its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headprune.criteria.registry import Criterion

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from headprune.signals import SiteRequest
    from headprune.signals.columns import Columns
    from headprune.units import Site


class ColumnCriterion(Criterion):
    """A score of every column from one forward pass over the data, and from those of its columns that of a member."""

    def of_columns(self, weight: torch.Tensor, seen: Columns) -> torch.Tensor:
        """The score of each column of the map [out x in]."""
        raise NotImplementedError

    def of_members(self, columns: torch.Tensor) -> torch.Tensor:
        """From the scores of their columns [members x width]."""
        return columns.sum(-1)

    def site_request(self) -> SiteRequest:
        from headprune.signals.columns import ColumnRequest

        return ColumnRequest()

    def score_site(self, model: PreTrainedModel, site: Site, gathered: Columns) -> torch.Tensor:
        from headprune.signals.columns import output_weight

        return self.of_members(site.split(self.of_columns(output_weight(model, site), gathered)))
