"""HIS and TIS: the expected change of the loss when a head's gate closes, to first order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.criteria.registry import Criterion, criterion

if TYPE_CHECKING:
    import torch

    from headprune.signals import Request


def expected_gate_gradient(sums: Mapping[str, torch.Tensor], samples: int) -> torch.Tensor:
    return sums["absolute"] / samples


@criterion(
    "his",
    reference="Michel, Levy, Neubig 2019, arXiv 1905.10650",
    use="a simple baseline where there are labels: one backward pass, and heads whose gate changes the loss stay",
    schedule="one-shot",
)
@dataclass(frozen=True)
class His(Criterion):
    """E | <Z, dL/dZ> | over samples, Z the output of the head; `normalize` divides by the l2 norm of each site."""

    normalize: bool = False

    def requests(self) -> tuple[Request, ...]:
        from headprune.signals import GateGradients

        return (GateGradients("loss"),)

    def sums(self, answers: Mapping[Request, torch.Tensor]) -> dict[str, torch.Tensor]:
        from headprune.signals import GateGradients

        return {"absolute": answers[GateGradients("loss")].abs().sum(0)}

    def score(self, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
        score = expected_gate_gradient(sums, samples)
        if self.normalize:
            import torch

            norms = score.nan_to_num(0.0).norm(dim=1, keepdim=True)
            score = score / norms.clamp_min(torch.finfo(score.dtype).tiny)
        return score


@criterion(
    "tis",
    reference="Eq. 8 of arXiv 2602.04491",
    use="as his, whose values it shares: heads compute Z = A V, so sum(A * dL/dA) = <Z, dL/dZ>",
    schedule="one-shot",
)
@dataclass(frozen=True)
class Tis(Criterion):
    """E | sum(A * dL/dA) | over samples, A the attention probabilities of the head."""

    def requests(self) -> tuple[Request, ...]:
        from headprune.signals import GateGradients

        return (GateGradients("loss"),)

    def sums(self, answers: Mapping[Request, torch.Tensor]) -> dict[str, torch.Tensor]:
        from headprune.signals import GateGradients

        return {"absolute": answers[GateGradients("loss")].abs().sum(0)}

    def score(self, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
        return expected_gate_gradient(sums, samples)
