"""HIES: gradient importance and attention entropy in one score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.criteria.entropy import check_entropy_options
from headprune.criteria.his import expected_gate_gradient
from headprune.criteria.registry import Criterion, criterion
from headprune.errors import CriterionError

if TYPE_CHECKING:
    import torch

    from headprune.signals import Request


def minmax(values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Scale the kept heads' values to [0, 1] over the whole model; all equal gives 0."""
    if not kept.any():
        return values
    low, high = values[kept].min(), values[kept].max()
    return (values - low) / (high - low) if high > low else values.new_zeros(values.shape)


@criterion(
    "hies",
    reference="HIES, arXiv 2510.13832",
    use="when predictions must stay stable at 30 % removed and more",
)
@dataclass(frozen=True)
class Hies(Criterion):
    """alpha * minmax(HIS) + (1 - alpha) * (1 - minmax(AE)), scaled over the heads that are left."""

    alpha: float = 0.5
    variant: str = "C"
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise CriterionError(f"alpha of hies must be in [0, 1), but it is {self.alpha}; alpha = 1 would be his.")
        check_entropy_options(self, self.variant, self.epsilon)

    def requests(self) -> tuple[Request, ...]:
        from headprune.signals import Entropy, GateGradients

        return GateGradients("loss"), Entropy(self.variant, self.epsilon)  # type: ignore[arg-type]

    def sums(self, answers: Mapping[Request, torch.Tensor]) -> dict[str, torch.Tensor]:
        gates, entropies = (answers[request] for request in self.requests())
        return {"absolute": gates.abs().sum(0), "entropy": entropies.sum(0)}

    def score(self, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
        importance = minmax(expected_gate_gradient(sums, samples), kept)
        entropy = minmax(sums["entropy"] / samples, kept)
        return self.alpha * importance + (1 - self.alpha) * (1 - entropy)
