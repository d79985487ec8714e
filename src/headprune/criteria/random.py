"""Random: the baseline that every criterion has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.criteria.registry import Criterion, criterion

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from headprune.units import Site


@criterion("random", reference="", use="the baseline to beat; run several seeds")
@dataclass(frozen=True)
class Random(Criterion):
    """A fixed random number per head: the same seed gives the same order, whatever has been removed."""

    seed: int = 0

    def from_weights(self, model: PreTrainedModel, sites: Sequence[Site]) -> torch.Tensor:
        import torch

        from headprune.units import nan_scores

        scores = nan_scores(sites)
        drawn = torch.rand(scores.shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        for site in sites:
            scores[site.index, list(site.kept)] = drawn[site.index, list(site.kept)]
        return scores
