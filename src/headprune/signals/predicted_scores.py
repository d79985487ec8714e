"""Scores of a site as they will be when some of its units have left, from the pass that scored it.

When units go and the output map is solved again, the others give what they gave; how they stand in for those that went
follows from the moments alone, and so does the gradient at each of them: if z_U is about z_K B, the part of the logits
that went through z_U goes through z_K, and the gradient there grows by B times that at z_U. What this leaves out: the
layers behind the site see something a little different then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from headprune.batches import widened
from headprune.signals.moments import Moments
from headprune.signals.residuals import RIDGE, gradient_of, residual_map, squared_products
from headprune.signals.tokens import Application, Tokens
from headprune.units import Site


def predicted_gradients(
    model: PreTrainedModel, site: Site, tokens: Tokens, gone: Sequence[int], *, repaired: bool
) -> torch.Tensor:
    """E [ <R, df/dZ>^2 ] of the members that stay when those with these ids leave and, where that is `repaired`, the
    others take over what they can."""
    moments = tokens.moments()
    lost = [site.position(member) for member in gone]
    kept = [position for position in range(site.size) if position not in set(lost)]
    staying, leaving = (torch.tensor(site.columns(positions)) for positions in (kept, lost))
    left = replace(site, kept=tuple(site.kept[position] for position in kept), order=())  # member after member
    fitted = residual_map(model, left, _part(moments, staying))
    across = _taken_over(model, site, moments, staying, leaving) if repaired else None

    def products(own: Application) -> torch.Tensor:
        gradient = widened(gradient_of(own))
        grown = gradient[:, staying]
        if across is not None:
            grown = grown + gradient[:, leaving] @ across.t().to(gradient)
        return fitted.of(own.inputs[:, staying]) * grown

    return squared_products(left, tokens, products)


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
