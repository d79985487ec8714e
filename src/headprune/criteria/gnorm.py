"""Gnorm: how strongly a head's Q, K and V weights pull on the output, as the product of three gradient norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.criteria.registry import Criterion, check_choice, criterion

if TYPE_CHECKING:
    import torch

    from headprune.signals import Request


@criterion(
    "gnorm",
    reference="Greedy-Gnorm, arXiv 2602.04491, Eq. 13-16",
    use="the method's own choice for greedy runs; needs no labels with the default objective",
)
@dataclass(frozen=True)
class Gnorm(Criterion):
    """S = G_Q * G_K * G_V, each the mean over samples of the Frobenius norm of the head's weight gradient.

    `aggregation="batch"` repeats the published notebooks: the norm of each batch's gradient, summed over batches and
    divided by the number of samples, which depends on the batch size and ranks heads differently.
    """

    objective: str = "logit-norm"
    aggregation: str = "sample"

    def __post_init__(self) -> None:
        check_choice(self, "objective", ("logit-norm", "loss"))
        check_choice(self, "aggregation", ("sample", "batch"))

    def requests(self) -> tuple[Request, ...]:
        from headprune.signals import BlockNorms

        return (BlockNorms(self.objective, self.aggregation),)  # type: ignore[arg-type]

    def sums(self, answers: Mapping[Request, torch.Tensor]) -> dict[str, torch.Tensor]:
        norms = answers[self.requests()[0]].sum(dim=1)
        return {"q": norms[0], "k": norms[1], "v": norms[2]}

    def score(self, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
        return (sums["q"] / samples) * (sums["k"] / samples) * (sums["v"] / samples)
