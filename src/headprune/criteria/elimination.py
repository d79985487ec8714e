"""Elimination: units of a site are removed one after the other, each time the one that costs least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headprune.criteria.registry import Criterion, check_choice, criterion
from headprune.errors import CriterionError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from headprune.signals import SiteRequest, Tokens
    from headprune.units import Site


@criterion(
    "elimination",
    reference="this project: docs/budgets.md; the order is that of optimal brain surgery (Hassibi and Stork 1993)",
    use="the default for budgets: the whole order of a site and its error at every width from one factorisation",
)
@dataclass(frozen=True)
class Elimination(Criterion):
    """The rise of the error of a site's output when a unit is removed and the others are solved again by least squares.

    The error is measured by what it does to the logits (`metric="gradient"`: E <g, e>^2 with g the gradient of the
    sum of the logits with random signs), or as it is (`metric="output"`). Units are removed one by one from the whole
    site, so a score depends on the units that remain then; scores of a site add up to its error at every width.
    """

    metric: str = "gradient"
    ridge: float = 0.1

    def __post_init__(self) -> None:
        check_choice(self, "metric", ("gradient", "output"))
        if not self.ridge > 0:
            raise CriterionError(f"ridge of elimination must be above 0, but it is {self.ridge}.")

    def site_request(self) -> SiteRequest:
        from headprune.signals import TokenRequest

        return TokenRequest(at_outputs=self.metric == "gradient")

    def score_site(self, model: PreTrainedModel, site: Site, gathered: Tokens) -> torch.Tensor:
        from headprune.criteria.elimination_math import site_scores
        from headprune.signals.sensitivity import Sensitivity

        return site_scores(model, site, Sensitivity.of(gathered), ridge=self.ridge, metric=self.metric)
