"""Predicted scores of a site after the removal of some of its units, from the pass that scored it.

When the units U are removed and the output map is solved again, the inputs of the remaining units K stay the same. How
they replace U follows from the moments alone, and so does the gradient at each of them: if z_U is about z_K B, the part
of the logits that depended on z_U depends on z_K, and the gradient there grows by B times that at z_U. This neglects
that the inputs of later layers change a little.
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
    model: PreTrainedModel, site: Site, tokens: Tokens, removed: Sequence[int], *, repaired: bool
) -> torch.Tensor:
    """E [ <R, df/dZ>^2 ] of the members that stay when these ids are removed and, where `repaired`, the output map is
    solved again."""
    moments = tokens.moments()
    removed_positions = [site.position(member) for member in removed]
    kept_positions = [position for position in range(site.size) if position not in set(removed_positions)]
    staying, leaving = (torch.tensor(site.columns(positions)) for positions in (kept_positions, removed_positions))
    remaining_site = replace(site, kept=tuple(site.kept[position] for position in kept_positions), order=())
    fitted = residual_map(model, remaining_site, _part(moments, staying))
    across = _regression_on_kept(model, site, moments, staying, leaving) if repaired else None

    def products(application: Application) -> torch.Tensor:
        gradient = widened(gradient_of(application))
        grown = gradient[:, staying]
        if across is not None:
            grown = grown + gradient[:, leaving] @ across.t().to(gradient)
        return fitted.of(application.inputs[:, staying]) * grown

    return squared_products(remaining_site, tokens, products)


def _part(moments: Moments, columns: torch.Tensor) -> Moments:
    """The moments of these columns."""
    products = moments.products[:, columns][:, :, columns]
    return Moments(moments.shift[columns], moments.total[:, columns], products, moments.counts, moments.samples)


def _regression_on_kept(
    model: PreTrainedModel, site: Site, moments: Moments, staying: torch.Tensor, leaving: torch.Tensor
) -> torch.Tensor:
    """How the columns that stay express those that leave, by least squares: [staying x leaving]."""
    centred = getattr(model.get_submodule(site.o), "bias", None) is not None
    spread = moments.covariance() if centred else moments.second()
    inner = spread[staying][:, staying]
    inner.diagonal().add_(RIDGE * inner.diagonal().mean().clamp_min(torch.finfo(inner.dtype).tiny))
    return torch.linalg.solve(inner, spread[staying][:, leaving])
