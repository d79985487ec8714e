"""Scores for units whose site is repaired after their removal: by the part of a unit's output that the other units of
the site cannot express."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.criteria.registry import Criterion, criterion

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from headprune.signals import Request, SiteRequest, Tokens
    from headprune.units import Site


@criterion(
    "residual-gradient",
    aliases=("repair",),
    reference="this project: docs/repair.md",
    use="the default, together with the least-squares repair; needs no labels",
)
@dataclass(frozen=True)
class ResidualGradient(Criterion):
    """E [ <R, df/dZ>^2 ] over samples: the expected squared change of the logits to first order when a head is removed.

    R is the part of the head's output Z that least squares on the other heads of its site cannot express, and f the
    sum of the logits with random signs, so that one backward pass serves all of them. With `residual=False` R is
    all of Z: a Fisher-weighted gate score, for removal without a repair.
    """

    residual: bool = True

    def requests(self) -> tuple[Request, ...]:
        from headprune.signals import GateGradients

        return () if self.residual else (GateGradients("logit-signs"),)

    def sums(self, answers: Mapping[Request, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"squares": answers[self.requests()[0]].square().sum(0)}

    def score(self, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
        return sums["squares"] / samples

    def site_request(self) -> SiteRequest | None:
        from headprune.signals import TokenRequest

        return TokenRequest(at_inputs=True) if self.residual else None

    def score_site(self, model: PreTrainedModel, site: Site, gathered: Tokens) -> torch.Tensor:
        from headprune.signals.residuals import residual_gradients

        return residual_gradients(model, site, gathered)

    def predict_site(
        self, model: PreTrainedModel, site: Site, gathered: Tokens, removed: Sequence[int], *, repaired: bool
    ) -> torch.Tensor | None:
        from headprune.signals.predicted_scores import predicted_gradients

        return predicted_gradients(model, site, gathered, removed, repaired=repaired)


@criterion(
    "residual-error",
    aliases=("lstsq",),
    reference="this project: docs/repair.md",
    use="when a backward pass costs too much: forward passes alone, no labels",
)
@dataclass(frozen=True)
class ResidualError(Criterion):
    """E [ |W R|^2 / |x|^2 ] over samples: the change of a site's output that remains after least squares.

    R is the part of a head's output that the other heads of its site cannot express, W the head's part of the output
    projection, x the residual stream after the site's layer.
    """

    def site_request(self) -> SiteRequest:
        from headprune.signals import TokenRequest

        return TokenRequest(streams=True)

    def score_site(self, model: PreTrainedModel, site: Site, gathered: Tokens) -> torch.Tensor:
        from headprune.signals.residuals import residual_errors

        return residual_errors(model, site, gathered)
