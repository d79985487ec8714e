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


class EntropyOptions(Criterion):
    """The options of criteria that use the entropy of attention, which such a criterion has among its fields."""

    variant: str
    epsilon: float
    kind: str
    order: float

    def __post_init__(self) -> None:
        check_choice(self, "variant", ("A", "B", "C"))
        check_choice(self, "kind", ("shannon", "renyi", "tsallis"))
        if not self.epsilon >= 0:
            raise CriterionError(f"epsilon of {self.name} must not be negative, but it is {self.epsilon}.")
        if not self.order > 0:
            raise CriterionError(f"order of {self.name} must be above 0, but it is {self.order}.")
        if self.kind == "shannon" and self.order != 1:
            raise CriterionError(
                f"order of {self.name} goes with kind=renyi or kind=tsallis; Shannon's entropy is that of order 1."
            )
        if self.kind != "shannon" and (self.variant, self.epsilon) != ("C", 1e-7):
            raise CriterionError(f"variant and epsilon of {self.name} go with kind=shannon; leave them out.")

    def entropy_request(self, *, deficit: bool) -> Request:
        """The entropy of each sample, or how far it is below the largest possible one, as a share of that."""
        from headprune.signals import Entropy, EntropyDeficit

        kind = EntropyDeficit if deficit else Entropy
        return kind(self.variant, self.epsilon, self.kind, self.order)  # type: ignore[arg-type]


@criterion(
    "entropy",
    reference="AE with the epsilon-rectified variants of arXiv 2602.04491",
    use="a label-free baseline: removes the heads with the most spread-out attention first",
    schedule="one-shot",
)
@dataclass(frozen=True)
class AttentionEntropy(EntropyOptions):
    """-AE: minus the mean entropy of the head's attention rows; `kind` and `order` choose Rényi's or Tsallis'."""

    variant: str = "C"
    epsilon: float = 1e-7
    kind: str = "shannon"
    order: float = 1.0

    def requests(self) -> tuple[Request, ...]:
        return (self.entropy_request(deficit=False),)

    def sums(self, answers: Mapping[Request, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"entropy": answers[self.requests()[0]].sum(0)}

    def score(self, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
        return -sums["entropy"] / samples


@criterion(
    "deficit",
    reference="the AD baseline of HIES, arXiv 2510.13832",
    use="the opposite of entropy, comparable across lengths: removes the most focused heads first",
    schedule="one-shot",
)
@dataclass(frozen=True)
class Deficit(EntropyOptions):
    """-AD, with AD = 1 - AE / log(t) for a sample of t tokens."""

    variant: str = "C"
    epsilon: float = 1e-7
    kind: str = "shannon"
    order: float = 1.0

    def requests(self) -> tuple[Request, ...]:
        return (self.entropy_request(deficit=True),)

    def sums(self, answers: Mapping[Request, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"deficit": answers[self.requests()[0]].sum(0)}

    def score(self, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
        return -sums["deficit"] / samples
