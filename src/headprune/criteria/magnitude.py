"""Magnitude: the size of a unit's weights, the baseline that looks at no data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.criteria.registry import KINDS, Criterion, criterion

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from headprune.units import Kind, Site


@criterion(
    "magnitude",
    reference="the L2 baseline of HIES, arXiv 2510.13832",
    use="a baseline without data or gradients",
    schedule="one-shot",
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
        from headprune.signals import weight_norms

        return weight_norms(model, sites)
