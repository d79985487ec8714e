"""Attention entropy and its deficit: heads whose attention is spread out, or focused, matter less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.criteria.registry import Criterion, check_choice, criterion
from headprune.errors import CriterionError

if TYPE_CHECKING:
    import torch

    from headprune.signals import Request


def check_entropy_options(made: Criterion, variant: str, epsilon: float) -> None:
    check_choice(made, "variant", ("A", "B", "C"))
    if not epsilon >= 0:
        raise CriterionError(f"epsilon of {made.name} must not be negative, but it is {epsilon}.")


@criterion(
    "entropy",
    reference="AE with the epsilon-rectified variants of arXiv 2602.04491",
    use="a label-free baseline: removes the heads with the most spread-out attention first",
)
@dataclass(frozen=True)
class AttentionEntropy(Criterion):
    """-AE: minus the mean entropy of the head's attention rows."""

    variant: str = "C"
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        check_entropy_options(self, self.variant, self.epsilon)

    def requests(self) -> tuple[Request, ...]:
        from headprune.signals import Entropy

        return (Entropy(self.variant, self.epsilon),)  # type: ignore[arg-type]

    def sums(self, answers: Mapping[Request, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"entropy": answers[self.requests()[0]].sum(0)}

    def score(self, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
        return -sums["entropy"] / samples


@criterion(
    "deficit",
    reference="the AD baseline of HIES, arXiv 2510.13832",
    use="the opposite of entropy, comparable across lengths: removes the most focused heads first",
)
@dataclass(frozen=True)
class Deficit(Criterion):
    """-AD, with AD = 1 - AE / log(t) for a sample of t tokens."""

    variant: str = "C"
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        check_entropy_options(self, self.variant, self.epsilon)

    def requests(self) -> tuple[Request, ...]:
        from headprune.signals import EntropyDeficit

        return (EntropyDeficit(self.variant, self.epsilon),)  # type: ignore[arg-type]

    def sums(self, answers: Mapping[Request, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"deficit": answers[self.requests()[0]].sum(0)}

    def score(self, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
        return -sums["deficit"] / samples
