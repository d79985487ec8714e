"""Moments of head outputs: what the heads of a site have in common, from forward passes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.hooks.outputs import evaluating, to_device
from headprune.hooks.watch import watched
from headprune.task.objectives import batch_size, model_inputs, query_tokens, with_decoder_inputs
from headprune.units import AttentionSite

FOLDS = 2  # parts of the samples, so that what is fitted to one can be tried on the other


@dataclass(frozen=True)
class Moments:
    """Sums over the real tokens of a site's concatenated head outputs, in float64, about a fixed `shift`.

    The shift, the mean of the first batch, keeps outputs with a large mean and a small spread exact. The first axis of
    all sums is the fold that a token's sample belongs to.
    """

    shift: torch.Tensor  # [width]
    total: torch.Tensor  # [folds x width]
    products: torch.Tensor  # [folds x width x width]
    counts: torch.Tensor  # [folds]

    @classmethod
    def about(cls, shift: torch.Tensor) -> Moments:
        width = len(shift)
        total, products = shift.new_zeros(FOLDS, width), shift.new_zeros(FOLDS, width, width)
        return cls(shift, total, products, torch.zeros(FOLDS, dtype=torch.long))

    def add(self, outputs: torch.Tensor, folds: torch.Tensor) -> None:
        """Take in outputs [tokens x width] of samples in these folds [tokens]."""
        centred = outputs.double() - self.shift.to(outputs.device)
        for fold in range(FOLDS):
            own = centred[folds == fold]
            self.total[fold] += own.sum(0).to(self.total)
            self.products[fold] += (own.t() @ own).to(self.products)
            self.counts[fold] += len(own)

    def only(self, fold: int) -> Moments:
        part = slice(fold, fold + 1)
        return Moments(self.shift, self.total[part], self.products[part], self.counts[part])

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> torch.Tensor:
        return self.shift + self.total.sum(0) / max(self.tokens, 1)

    def about_point(self, point: torch.Tensor) -> torch.Tensor:
        """E[(z - point)(z - point)^T]."""
        offset = self.total.sum(0) / max(self.tokens, 1)
        away = self.mean - point
        return self.products.sum(0) / max(self.tokens, 1) - torch.outer(offset, offset) + torch.outer(away, away)

    def covariance(self) -> torch.Tensor:
        return self.about_point(self.mean)

    def second(self) -> torch.Tensor:
        """E[z z^T], about zero."""
        return self.about_point(torch.zeros_like(self.shift))


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
    samples = 0
    for raw in batches if wanted else ():
        batch = with_decoder_inputs(model, to_device(raw, device))
        left = {site.index: site.applications for site in wanted}

        def see(
            site: AttentionSite, outputs: torch.Tensor, batch: dict = batch, left: dict = left, first: int = samples
        ) -> None:
            tokens, rows = real_outputs(site, batch, outputs)
            if len(tokens):
                if site.index not in found:
                    found[site.index] = Moments.about(tokens.double().mean(0).cpu())
                found[site.index].add(tokens, (rows + first) % FOLDS)
            left[site.index] -= 1
            if not any(count > 0 for count in left.values()):
                raise _NothingLeftToSeeError

        with torch.no_grad(), evaluating(model), watched(model, wanted, output=see), suppress(_NothingLeftToSeeError):
            model(**model_inputs(model, batch))
        samples += batch_size(batch)
    return found


def real_outputs(
    site: AttentionSite, batch: Mapping[str, Any], outputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The head outputs of tokens that are not padding, [tokens x width], and the sample of each, [tokens]."""
    flat = outputs.detach().flatten(0, -2)
    flat = flat.cpu() if flat.device.type == "mps" else flat  # which has no float64
    rows = torch.arange(len(flat), device=flat.device) * batch_size(batch) // max(len(flat), 1)
    mask = query_tokens(site, batch)
    if mask is None or mask.numel() != len(flat):
        return flat, rows
    real = mask.flatten().to(flat.device)
    return flat[real], rows[real]
