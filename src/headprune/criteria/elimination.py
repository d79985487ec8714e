"""Elimination: units of a site leave one after the other, each time the one that the rest can best do without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headprune.criteria.registry import KINDS, Criterion, check_choice, criterion
from headprune.errors import CriterionError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from headprune.tasks import Labels, Task
    from headprune.units import Site


@criterion(
    "elimination",
    reference="this project: docs/budgets.md; the order is that of optimal brain surgery (Hassibi and Stork 1993)",
    use="the default for budgets: the whole order of a site and its error at every width from one factorisation",
)
@dataclass(frozen=True)
class Elimination(Criterion):
    """What the error of a site's output rises by when a unit leaves, the others being solved again by least squares.

    The error is measured by what it does to the logits (`metric="gradient"`: E <g, e>^2 with g the gradient of the
    logits added up with random signs), or as it is (`metric="output"`). Units leave backwards from the whole site, so a
    score belongs to what is left when a unit's turn comes; scores of a site add up to its error at every width.
    """

    kinds = KINDS
    gathers = True

    metric: str = "gradient"
    ridge: float = 0.1

    def __post_init__(self) -> None:
        check_choice(self, "metric", ("gradient", "output"))
        if not self.ridge > 0:
            raise CriterionError(f"ridge of elimination must be above 0, but it is {self.ridge}.")

    @property
    def needs(self) -> list[str]:
        return ["gradients"] if self.metric == "gradient" else ["data"]

    def from_data(
        self,
        model: PreTrainedModel,
        sites: Sequence[Site],
        batches: Sequence[Mapping[str, Any]],
        task: Task,
        labels: Labels,
    ) -> torch.Tensor:
        from headprune import distributed
        from headprune.criteria.elimination_math import gathered_together, site_scores
        from headprune.signals.sensitivity import gather_sensitivity, own_sites
        from headprune.units import nan_scores

        scores = nan_scores(sites)
        for part in gathered_together(model, sites, batches):
            found = gather_sensitivity(model, part, batches, task, gradients=self.metric == "gradient")
            with distributed.fail_together():
                own = {
                    site.index: site_scores(model, site, found.pop(site.index, None), ridge=self.ridge)
                    for site in own_sites(part)
                }
            for share in distributed.all_gather(own):
                for index, values in share.items():
                    scores[index, list(sites[index].kept)] = values
        return scores
