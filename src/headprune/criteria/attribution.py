"""Self-attention attribution as an importance: the strongest connection a head makes for the label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.criteria.registry import Criterion, criterion
from headprune.errors import CriterionError

if TYPE_CHECKING:
    import torch

    from headprune.signals import Request


@criterion(
    "attribution",
    reference="Hao et al. 2021, arXiv 2004.11207, Eq. 5-7",
    use="for interpretation; costs `steps` passes per site, so keep the calibration set small",
    schedule="one-shot",
)
@dataclass(frozen=True)
class SelfAttentionAttribution(Criterion):
    """E[max(Attr)] over samples, Attr integrated in `steps` steps from no attention to the head's attention."""

    steps: int = 20

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise CriterionError(f"steps of attribution must be at least 1, but it is {self.steps}.")

    def requests(self) -> tuple[Request, ...]:
        from headprune.signals import Attribution

        return (Attribution(self.steps),)

    def sums(self, answers: Mapping[Request, torch.Tensor]) -> dict[str, torch.Tensor]:
        from headprune.signals import Attribution

        return {"largest": answers[Attribution(self.steps)].sum(0)}

    def score(self, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
        return sums["largest"] / samples
