"""First and second moments of the inputs of a site's output map, from forward passes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.hooks.logit_blocks import few_logits
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.hooks.site_activations import site_callbacks
from headprune.hooks.stop_forward import StopForwardError
from headprune.tasks import Task, batch_size, own_batches, task_of
from headprune.units import Site

FOLDS = 2  # parts of the samples, so that a fit to one can be tested on the other


@dataclass(frozen=True)
class Moments:
    """Sums over the real tokens of the inputs of a site's output map, in float64 by default, about a fixed `shift`.

    The shift, the mean of the first sample, keeps outputs with a large mean and a small spread exact. The first axis
    of all sums is the fold that a token's sample belongs to: its number in the data, modulo the folds. Moments of two
    shards of the data, in their order, add up to those of one pass.
    """

    shift: torch.Tensor  # [width]
    total: torch.Tensor  # [folds x width]
    products: torch.Tensor  # [folds x width x width]
    counts: torch.Tensor  # [folds], of tokens
    samples: int = 0  # those without a real token included

    @classmethod
    def about(cls, shift: torch.Tensor, folds: int = FOLDS) -> Moments:
        width = len(shift)
        total, products = shift.new_zeros(folds, width), shift.new_zeros(folds, width, width)
        return cls(shift, total, products, torch.zeros(folds, dtype=torch.long))

    @property
    def folds(self) -> int:
        return len(self.counts)

    def add(self, outputs: torch.Tensor, folds: torch.Tensor) -> None:
        """Add outputs [tokens x width] of samples in these folds [tokens]."""
        centred = outputs.to(self.shift.dtype) - self.shift.to(outputs.device)
        for fold in range(self.folds):
            tokens = centred[folds == fold]
            self.total[fold] += tokens.sum(0).to(self.total)
            self.products[fold] += (tokens.t() @ tokens).to(self.products)
            self.counts[fold] += len(tokens)

    def __add__(self, other: Moments) -> Moments:
        """Of two shards; the samples of the other come after these."""
        moved = other._about(self.shift)
        order = [(fold - self.samples) % self.folds for fold in range(self.folds)]
        return Moments(
            self.shift,
            self.total + moved.total[order],
            self.products + moved.products[order],
            self.counts + moved.counts[order],
            self.samples + other.samples,
        )

    def _about(self, shift: torch.Tensor) -> Moments:
        """The same moments about another point."""
        if torch.equal(shift, self.shift):
            return self
        away = self.shift - shift
        counts = self.counts.to(self.total.dtype)[:, None]
        cross = self.total[:, :, None] * away
        products = self.products + cross + cross.transpose(1, 2) + counts[..., None] * torch.outer(away, away)
        return Moments(shift, self.total + counts * away, products, self.counts.clone(), self.samples)

    def only(self, fold: int) -> Moments:
        part = slice(fold, fold + 1)
        return Moments(self.shift, self.total[part], self.products[part], self.counts[part], self.samples)

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
        spread = self.products.sum(0)
        spread /= max(self.tokens, 1)  # in place: thousands of neurons squared are a GB
        spread -= torch.outer(offset, offset)
        spread += torch.outer(away, away)
        return spread

    def covariance(self) -> torch.Tensor:
        return self.about_point(self.mean)

    def second(self) -> torch.Tensor:
        """E[z z^T], about zero."""
        return self.about_point(torch.zeros_like(self.shift))


class Gathering:
    """Moments of sites, site by site and batch by batch as they run. One fold is enough, and half of the memory, where
    nothing is tested on held-out samples."""

    def __init__(self, precision: torch.dtype = torch.float64, folds: int = FOLDS) -> None:
        self.precision, self.folds = precision, folds
        self.samples = 0  # of the finished batches
        self.by_site: dict[int, Moments] = {}

    def add(self, site: int, tokens: torch.Tensor, samples: torch.Tensor) -> None:
        """Add inputs of the output map of a site [tokens x width], for tokens of these samples [tokens]."""
        if len(tokens):
            if site not in self.by_site:
                first = tokens[samples == samples[0]].to(self.precision).mean(0)
                self.by_site[site] = Moments.about(first.cpu(), self.folds)
            self.by_site[site].add(tokens, samples % self.folds)

    def moments(self) -> dict[int, Moments]:
        """Moments over all processes, whose samples are numbered in all the data."""
        if not distributed.is_distributed():
            return {index: _counted(moments, self.samples) for index, moments in self.by_site.items()}
        parts = distributed.all_gather(({index: local.shift for index, local in self.by_site.items()}, self.samples))
        shifts: dict[int, torch.Tensor] = {}
        for shifts_of_process, _ in parts:
            shifts = {**shifts_of_process, **shifts}
        result = {}
        for index in sorted(shifts):
            local = self.by_site.get(index)
            moved = Moments.about(shifts[index], self.folds) if local is None else local._about(shifts[index])
            distributed.all_reduce(moved.total, moved.products, moved.counts)
            result[index] = _counted(moved, sum(count for _, count in parts))
        return result


def gather(
    model: PreTrainedModel, sites: Sequence[Site], batches: Iterable[Mapping[str, Any]], task: Task | None = None
) -> dict[int, Moments]:
    """The moments of these sites, by index, from a forward pass that ends after the last of them.

    All applications of a tied site are pooled; padding is left out. Several processes share the batches, and all get
    the moments of all of them.
    """
    task = task or task_of(model)
    sites_with_units = [site for site in sites if site.kept]
    device = input_device(model)
    gathering = Gathering()
    stopping = suppress(StopForwardError)
    with distributed.fail_together():
        for _, first, raw in own_batches(batches if sites_with_units else (), "gathering activations"):
            batch = task.prepare(raw, device)
            left = {site.index: site.applications for site in sites_with_units}

            def see(
                site: Site, outputs: torch.Tensor, batch: dict = batch, left: dict = left, first: int = first
            ) -> None:
                tokens, rows = real_outputs(site, batch, outputs, task)
                gathering.add(site.index, tokens, rows + first)
                left[site.index] -= 1
                if not any(count > 0 for count in left.values()):
                    raise StopForwardError

            with torch.no_grad(), evaluating(model), site_callbacks(model, sites_with_units, output=see), stopping:
                model(**few_logits(model, task.inputs(batch)))
            gathering.samples += batch_size(batch)
    return gathering.moments()


def _counted(moments: Moments, samples: int) -> Moments:
    return Moments(moments.shift, moments.total, moments.products, moments.counts, samples)


def real_outputs(
    site: Site, batch: Mapping[str, Any], outputs: torch.Tensor, task: Task, counts: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of the output map for tokens that are not padding, [tokens x width], and the sample of each.

    `counts` are the rows of each sample. Without them every sample has as many, which for vision towers with images of
    all samples in one row is only about right: enough to divide the data into folds.
    """
    flat = outputs.detach().flatten(0, -2)
    flat = flat.cpu() if flat.device.type == "mps" else flat  # which has no float64
    size = batch_size(batch)
    if counts is None:
        rows = torch.arange(len(flat), device=flat.device) * size // max(len(flat), 1)
    else:
        rows = torch.arange(size).repeat_interleave(torch.tensor(counts)).to(flat.device)
    mask = task.site_tokens(site, batch, len(flat) // (size * task.rows(batch)))
    if mask is None or mask.numel() != len(flat):
        return flat, rows
    real = mask.flatten().to(flat.device)
    return flat[real], rows[real]
