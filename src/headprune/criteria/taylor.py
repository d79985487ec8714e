"""Taylor: LLM-Pruner's first-order estimate of what removing a head's weights does to the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.criteria.registry import Criterion, criterion

if TYPE_CHECKING:
    import torch

    from headprune.signals import Request


@criterion(
    "taylor",
    reference="LLM-Pruner, arXiv 2305.11627, first order, one score per head",
    use="LLM-Pruner's choice for language models; signs cancel over the calibration set before the absolute value",
    schedule="one-shot",
)
@dataclass(frozen=True)
class Taylor(Criterion):
    """| sum w * dL/dw | over the head's Q, K, V and output weights, L the mean loss of the calibration set."""

    def requests(self) -> tuple[Request, ...]:
        from headprune.signals import GateGradients, WeightProducts

        return WeightProducts("loss"), GateGradients("loss")

    def sums(self, answers: Mapping[Request, torch.Tensor]) -> dict[str, torch.Tensor]:
        projections, outputs = (answers[request] for request in self.requests())
        # The output projection's share, sum w * dL/dw over its columns, is <Z, dL/dZ>.
        return {"signed": (projections + outputs).sum(0)}

    def score(self, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
        return (sums["signed"] / samples).abs()
