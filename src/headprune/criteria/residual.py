"""Scores for units whose site is repaired after they go: what counts is what nobody can take over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.criteria.registry import Criterion, criterion

if TYPE_CHECKING:
    import torch

    from headprune.signals import Request


@criterion(
    "residual-gradient",
    aliases=("repair",),
    reference="this project: docs/repair.md",
    use="the default, together with least-squares compensation; needs no labels",
)
@dataclass(frozen=True)
class ResidualGradient(Criterion):
    """E [ <R, df/dZ>^2 ] over samples: the expected squared change of the logits to first order when a head goes.

    R is the part of the head's output Z that least squares on the other heads of its site cannot express, and f the
    logits added up with random signs, so that one backward pass stands for all of them. With `residual=False` R is
    all of Z: a Fisher-weighted gate score, for removal without compensation.
    """

    residual: bool = True

    def requests(self) -> tuple[Request, ...]:
        from headprune.signals import GateGradients, ResidualGradients

        return (ResidualGradients(),) if self.residual else (GateGradients("logit-signs"),)

    def sums(self, answers: Mapping[Request, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"squares": answers[self.requests()[0]].square().sum(0)}

    def score(self, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
        return sums["squares"] / samples


@criterion(
    "residual-error",
    aliases=("lstsq",),
    reference="this project: docs/repair.md",
    use="when a backward pass is too dear: forward passes alone, no labels",
)
@dataclass(frozen=True)
class ResidualError(Criterion):
    """E [ |W R|^2 / |x|^2 ] over samples: the change of a site's output that remains after least squares.

    R is the part of a head's output that the other heads of its site cannot express, W the head's part of the output
    projection, x the residual stream after the site's layer.
    """

    def requests(self) -> tuple[Request, ...]:
        from headprune.signals import ResidualErrors

        return (ResidualErrors(),)

    def sums(self, answers: Mapping[Request, torch.Tensor]) -> dict[str, torch.Tensor]:
        from headprune.signals import ResidualErrors

        return {"errors": answers[ResidualErrors()].sum(0)}

    def score(self, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
        return sums["errors"] / samples
