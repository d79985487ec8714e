"""Scores of a site as they will be when some of its units have left, from the pass that scored it.

When units go and the output map is solved again, the others give what they gave; how they stand in for those that went
follows from the moments alone, and so does the gradient at each of them: if z_U is about z_K B, the part of the logits
that went through z_U goes through z_K, and the gradient there grows by B times that at z_U. What this leaves out: the
layers behind the site see something a little different then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.batches import widened
from headprune.signals.moments import Moments
from headprune.signals.residuals import RIDGE, ResidualMap, residual_map
from headprune.signals.spec import unit_sums
from headprune.units import Site

LIMIT = 1 << 29  # bytes that are kept


@dataclass
class Ahead:
    """What sites gave and the gradients there, of one pass over the data."""

    # site -> pass of a batch -> (values, gradient) [samples x tokens x columns] of each application
    seen: dict[int, dict[int, list[tuple[torch.Tensor, torch.Tensor]]]] = field(default_factory=dict)
    bytes: int = 0

    def keep(self, site: Site, batch: int, values: torch.Tensor, gradient: torch.Tensor) -> None:
        self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in (values, gradient))
        if self.bytes > LIMIT:
            self.seen.clear()
        else:
            self.seen.setdefault(site.index, {}).setdefault(batch, []).append((values, gradient))

    def is_whole(self) -> bool:
        """Whether all that went by was kept. Several processes share the limit, so that they tell what one would."""
        return sum(distributed.all_gather(self.bytes)) <= LIMIT

    def products(
        self, model: PreTrainedModel, site: Site, moments: Moments, gone: Sequence[int], *, repaired: bool
    ) -> torch.Tensor:
        """<R, df/dZ> of each sample and member that stays, [samples x members], when the members with these ids leave
        and, where that is `repaired`, the others take over what they can."""
        lost = [site.position(member) for member in gone]
        kept = [position for position in range(site.size) if position not in set(lost)]
        staying, leaving = (torch.tensor(site.columns(positions)) for positions in (kept, lost))
        left = replace(site, kept=tuple(site.kept[position] for position in kept), order=())  # member after member
        fitted = residual_map(model, left, _part(moments, staying))
        across = _taken_over(model, site, moments, staying, leaving) if repaired else None
        found = []
        for applications in self.seen.get(site.index, {}).values():
            own = [_products(left, fitted, across, *what, staying, leaving) for what in applications]
            found.append(unit_sums(left, torch.stack(own).sum(0)))
        return torch.cat(found) if found else torch.zeros(0, left.size)  # of a process without batches


def _products(
    left: Site,
    fitted: ResidualMap,
    across: torch.Tensor | None,
    values: torch.Tensor,
    gradient: torch.Tensor,
    staying: torch.Tensor,
    leaving: torch.Tensor,
) -> torch.Tensor:
    gradient = widened(gradient)
    staying_gradient = gradient[..., staying]
    if across is not None:
        staying_gradient = staying_gradient + gradient[..., leaving] @ across.t().to(gradient)
    return left.split((fitted.of(values[..., staying]) * staying_gradient).sum(1)).sum(-1)


def _part(moments: Moments, columns: torch.Tensor) -> Moments:
    """The moments of these columns."""
    products = moments.products[:, columns][:, :, columns]
    return Moments(moments.shift[columns], moments.total[:, columns], products, moments.counts, moments.samples)


def _taken_over(
    model: PreTrainedModel, site: Site, moments: Moments, staying: torch.Tensor, leaving: torch.Tensor
) -> torch.Tensor:
    """How the columns that stay express those that leave, by least squares: [staying x leaving]."""
    centred = getattr(model.get_submodule(site.o), "bias", None) is not None
    spread = moments.covariance() if centred else moments.second()
    inner = spread[staying][:, staying]
    inner.diagonal().add_(RIDGE * inner.diagonal().mean().clamp_min(torch.finfo(inner.dtype).tiny))
    return torch.linalg.solve(inner, spread[staying][:, leaving])
