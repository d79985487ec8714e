"""Random: the baseline that every criterion has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.criteria.registry import KINDS, Criterion, criterion

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from headprune.units import Kind, Site


@criterion("random", reference="", use="the baseline to beat; run several seeds", schedule="one-shot")
@dataclass(frozen=True)
class Random(Criterion):
    """A fixed random number per unit: the same seed gives the same order, whatever has been removed.

    Heads have the same numbers whether neurons are scored with them or not.
    """

    seed: int = 0

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return KINDS

    def from_weights(self, model: PreTrainedModel, sites: Sequence[Site]) -> torch.Tensor:
        import torch

        from headprune.units import nan_scores

        scores = nan_scores(sites)
        generator = torch.Generator().manual_seed(self.seed)
        for kind in KINDS:
            sites_of_kind = [site for site in sites if site.kind == kind]
            numbers = torch.rand(nan_scores(sites_of_kind).shape, generator=generator, dtype=torch.float64)
            for row, site in enumerate(sites_of_kind):
                scores[site.index, list(site.kept)] = numbers[row, list(site.kept)]
        return scores
