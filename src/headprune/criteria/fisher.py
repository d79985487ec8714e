"""Fisher: the loss to second order when a unit's gate closes, and which units of a site to remove together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headprune.criteria.registry import Criterion, criterion

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from headprune.signals import Request
    from headprune.tasks import Labels, Task
    from headprune.units import Member, Site


@criterion(
    "fisher",
    reference="Kwon et al. 2022, arXiv 2204.09656",
    use="budgets without rounds, where there are labels",
    schedule="one-shot",
)
@dataclass(frozen=True)
class Fisher(Criterion):
    """Sum over samples of (dL/dm)^2, m the gate of a unit.

    That is the diagonal of the Fisher matrix. With `rearrange`, units that were chosen to leave a site are exchanged
    for others of the same site while that lowers 1^T F 1 over the removed units, F the block of the site: two units
    that replace each other are costly to remove together, which no score per unit can express. Budgets only.
    """

    rearrange: bool = False

    def requests(self) -> tuple[Request, ...]:
        from headprune.signals import GateGradients

        return (GateGradients("loss", together=True),)

    def sums(self, answers: Mapping[Request, torch.Tensor]) -> dict[str, torch.Tensor]:
        (request,) = self.requests()
        return {"squares": answers[request].square().sum(0)}

    def score(self, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
        return sums["squares"]

    def rearranged(
        self,
        chosen: Sequence[Member],
        model: PreTrainedModel,
        sites: Sequence[Site],
        batches: Sequence[Mapping[str, Any]],
        task: Task,
        labels: Labels,
    ) -> list[Member]:
        if not self.rearrange:
            return list(chosen)
        import torch

        from headprune import distributed
        from headprune.signals import observe
        from headprune.tasks import own_batches
        from headprune.units.members import by_site

        ids_by_site = by_site(chosen)
        (request,) = self.requests()
        parts: dict[int, dict[int, torch.Tensor]] = {}  # by batch and site
        with distributed.fail_together():
            for number, _, batch in own_batches(batches, "rearranging units"):
                gradients_of_units = observe(model, sites, batch, [request], task=task, labels=labels).answers[request]
                # All members of a unit have its gradient.
                parts[number] = {
                    index: gradients_of_units[:, index, list(sites[index].kept[:: sites[index].group])]
                    for index in ids_by_site
                }
        whole = {
            number: gradients_by_site
            for share in distributed.all_gather(parts)
            for number, gradients_by_site in share.items()
        }
        result: list[Member] = []
        for index, ids in ids_by_site.items():
            site = sites[index]
            gradients = torch.cat([whole[number][index] for number in sorted(whole)]).double()
            leaving = swap_units(gradients, len(ids) // site.group)
            units = site.units()
            result += [member for unit in leaving for member in units[unit]]
        return result


def swap_units(gradients: torch.Tensor, count: int) -> list[int]:
    """The `count` units to remove, from gate gradients [samples x units].

    Starts with the smallest squares. Then every other unit, in rising order, is added to the set, and the one whose
    removal from the set lowers the effect most is taken out: one pass over the units, in which the effect never rises.
    """
    order = gradients.square().sum(0).argsort(stable=True).tolist()
    if count in (0, len(order)):
        return sorted(order[:count])
    chosen = order[:count]
    total = gradients[:, chosen].sum(1)
    columns = gradients.t().contiguous()
    for unit in order[count:]:
        chosen.append(unit)
        total = total + columns[unit]
        out = int((total - columns[chosen]).square().sum(1).argmin())
        total = total - columns[chosen[out]]
        del chosen[out]
    return sorted(chosen)
