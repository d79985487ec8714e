"""Magnitude: the size of a unit's weights, the baseline that looks at no data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headprune.criteria.registry import KINDS, Criterion, criterion

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from headprune.units import Kind, Site


@criterion(
    "magnitude",
    reference="the L2 baseline of HIES, arXiv 2510.13832",
    use="a baseline without data or gradients",
)
@dataclass(frozen=True)
class Magnitude(Criterion):
    """L2 norm of the head's Q, K and V rows and output columns together; biases do not count.

    A neuron has its rows of all maps before it and its column of the output map.
    """

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return KINDS

    def from_weights(self, model: PreTrainedModel, sites: Sequence[Site]) -> torch.Tensor:
        import torch

        from headprune.units import nan_scores

        scores = nan_scores(sites)
        for site in sites:
            if not site.kept:
                continue
            squares = torch.zeros(site.size, dtype=torch.float64)
            for axis in site.roles.values():
                rows = axis.split(_weight(model, axis.module, outputs_last=True))
                squares += site.by_member(axis, rows.square().sum(dim=(0, 2)))
            columns = site.split(_weight(model, site.o, outputs_last=False))
            squares += columns.square().sum(dim=(0, 2))
            scores[site.index, list(site.kept)] = squares.sqrt()
        return scores


def _weight(model: PreTrainedModel, path: str, *, outputs_last: bool) -> torch.Tensor:
    from headprune.hooks.offload import stored
    from headprune.units.linear import is_transposed

    module: Any = model.get_submodule(path)
    weight = stored(module).detach().double().cpu()
    return weight if is_transposed(module) == outputs_last else weight.T
