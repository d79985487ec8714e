"""Moments of head outputs: what the heads of a site have in common, from forward passes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.instrument import watched
from headprune.outputs import evaluating, to_device
from headprune.signals.objectives import model_inputs, query_tokens, with_decoder_inputs
from headprune.sites import AttentionSite


@dataclass
class Moments:
    """Sums over the real tokens of a site's concatenated head outputs, in float64, about a fixed `shift`.

    The shift, the mean of the first batch, keeps outputs with a large mean and a small spread exact.
    """

    shift: torch.Tensor  # [width]
    total: torch.Tensor  # [width]
    products: torch.Tensor  # [width x width]
    tokens: int = 0

    @classmethod
    def about(cls, shift: torch.Tensor) -> Moments:
        return cls(shift, torch.zeros_like(shift), shift.new_zeros(len(shift), len(shift)))

    def add(self, outputs: torch.Tensor) -> None:
        """Take in outputs [tokens x width]."""
        centred = outputs.double() - self.shift.to(outputs.device)
        self.total += centred.sum(0).to(self.total)
        self.products += (centred.t() @ centred).to(self.products)
        self.tokens += len(outputs)

    @property
    def mean(self) -> torch.Tensor:
        return self.shift + self.total / max(self.tokens, 1)

    def covariance(self) -> torch.Tensor:
        offset = self.total / max(self.tokens, 1)
        return self.products / max(self.tokens, 1) - torch.outer(offset, offset)

    def second(self) -> torch.Tensor:
        """E[z z^T], about zero."""
        return self.covariance() + torch.outer(self.mean, self.mean)


class _NothingLeftToSeeError(Exception):
    """All sites that were asked for have run, so the rest of the forward pass is not needed."""


def gather(
    model: PreTrainedModel, sites: Sequence[AttentionSite], batches: Iterable[Mapping[str, Any]]
) -> dict[int, Moments]:
    """The moments of these sites, by index, from a forward pass that ends after the last of them.

    All applications of a tied site are pooled; padding is left out.
    """
    wanted = [site for site in sites if site.kept]
    device = next(model.parameters()).device
    found: dict[int, Moments] = {}
    for raw in batches if wanted else ():
        batch = with_decoder_inputs(model, to_device(raw, device))
        left = {site.index: site.applications for site in wanted}

        def see(site: AttentionSite, outputs: torch.Tensor, batch: dict = batch, left: dict = left) -> None:
            tokens = real_outputs(site, batch, outputs)
            tokens = tokens.cpu() if tokens.device.type == "mps" else tokens  # which has no float64
            if len(tokens):
                if site.index not in found:
                    found[site.index] = Moments.about(tokens.double().mean(0).cpu())
                found[site.index].add(tokens)
            left[site.index] -= 1
            if not any(count > 0 for count in left.values()):
                raise _NothingLeftToSeeError

        with torch.no_grad(), evaluating(model), watched(model, wanted, output=see), suppress(_NothingLeftToSeeError):
            model(**model_inputs(model, batch))
    return found


def real_outputs(site: AttentionSite, batch: Mapping[str, Any], outputs: torch.Tensor) -> torch.Tensor:
    """The head outputs of tokens that are not padding, [tokens x width]."""
    mask = query_tokens(site, batch)
    flat = outputs.detach().flatten(0, -2)
    if mask is None or mask.numel() != len(flat):
        return flat
    return flat[mask.flatten()]
