"""Entropy of attention rows, reduced while each site runs; long texts in blocks of queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from headprune.batches import widened
from headprune.hooks.attention_blocks import Rows, allowed_keys
from headprune.signals.spec import Meter, Request, View
from headprune.units import Site


def row_entropies(probabilities: torch.Tensor, valid: torch.Tensor, variant: str, epsilon: float) -> torch.Tensor:
    """Entropy of each row over its valid keys: A is -sum a log a, B adds epsilon inside the log, C also before it."""
    if variant == "A":
        terms = torch.special.entr(probabilities)
    elif variant == "B":
        terms = -probabilities * (probabilities + epsilon).log()
    else:
        terms = torch.special.entr(probabilities + epsilon)
    return terms.where(valid, terms.new_zeros(())).sum(-1)  # padding may attend to nothing, which gives NaN


def real_entries(site: Site, view: View, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of these queries are real [rows, 1, queries], and per query the keys it may attend to [.., queries,
    keys]."""
    weights, mask = rows.probabilities, rows.mask
    queries, keys = weights.shape[-2:]
    task, batch = view.task, view.batch
    query_mask = task.site_tokens(site, batch, rows.queries)
    key_mask = task.key_tokens(site, batch, keys)
    valid = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=weights.device)
    if mask is not None:
        valid = valid & allowed_keys(mask)
    if key_mask is not None and key_mask.shape == (weights.shape[0], keys):
        valid = valid & key_mask[:, None, None, :]
    real = torch.ones(weights.shape[0], 1, queries, dtype=torch.bool, device=weights.device)
    if query_mask is not None and query_mask.shape == (weights.shape[0], rows.queries):
        real = query_mask[:, None, rows.first : rows.first + queries]
    return real, valid


def generalised_entropies(probabilities: torch.Tensor, valid: torch.Tensor, kind: str, order: float) -> torch.Tensor:
    """The Rényi or Tsallis entropy of each row over its valid keys; of order 1 both are Shannon's."""
    if order == 1:
        return row_entropies(probabilities, valid, "A", 0.0)
    # 1 - sum p^order, term by term: near order 1 it is tiny, and the rounding of a row's sum would drown it.
    exact = probabilities.double()
    terms = -exact * torch.expm1((order - 1) * exact.log())
    missing = terms.where(valid & (exact > 0), terms.new_zeros(())).sum(-1)
    entropies = torch.log1p(-missing) / (1 - order) if kind == "renyi" else missing / (order - 1)
    return entropies.to(probabilities.dtype)


def largest_entropy(keys: torch.Tensor, kind: str, order: float) -> torch.Tensor:
    """That of a row which is spread evenly over this many keys."""
    if kind != "tsallis" or order == 1:
        return keys.log()
    return ((1 - keys.double().pow(1 - order)) / (order - 1)).to(keys.dtype)


Sums = tuple[torch.Tensor, ...]  # over blocks of queries


@dataclass(frozen=True)
class Entropy(Request):
    """Mean entropy of the attention rows of each sample's real tokens; variants as in METHODS of arXiv 2602.04491.
    Those are of Shannon's entropy; Rényi's and Tsallis' have an `order`."""

    needs: ClassVar[tuple[str, ...]] = ("attention probabilities",)
    variant: Literal["A", "B", "C"] = "C"
    epsilon: float = 1e-7
    kind: Literal["shannon", "renyi", "tsallis"] = "shannon"
    order: float = 1.0

    def meter(self, view: View) -> Meter:
        return _RowMeter(self, view)

    def sums(self, weights: torch.Tensor, real: torch.Tensor, valid: torch.Tensor) -> Sums:
        """Of some queries, from probabilities [samples, heads, .., queries, keys]: their entropies and number."""
        if self.kind == "shannon":
            entropies = row_entropies(weights, valid, self.variant, self.epsilon)
        else:
            entropies = generalised_entropies(weights, valid, self.kind, self.order)
        counted = real.expand(len(weights), *real.shape[1:])
        total = entropies.where(counted, entropies.new_zeros(())).flatten(2).sum(-1)
        return total, counted.flatten(2).sum(-1)

    def value(self, sums: Sums) -> torch.Tensor:
        """A number per sample and head."""
        return sums[0] / sums[1].clamp_min(1)


@dataclass(frozen=True)
class EntropyDeficit(Entropy):
    """1 - entropy / log(t) of each sample of t tokens; a sample of one token has no deficit. Log(t) is the largest
    entropy of t keys; that of Tsallis' entropy is another function of t."""

    def sums(self, weights: torch.Tensor, real: torch.Tensor, valid: torch.Tensor) -> Sums:
        return *super().sums(weights, real, valid), (valid & real.unsqueeze(-1)).sum(-2)

    def value(self, sums: Sums) -> torch.Tensor:
        # The largest possible entropy is that over all real keys of the sample.
        keys = (sums[2] > 0).sum(-1).clamp_min(1).to(sums[0].dtype)
        largest = largest_entropy(keys, self.kind, self.order)
        largest = largest.flatten(2).mean(-1) if largest.dim() > 2 else largest
        values = super().value(sums)
        return torch.where(largest > 0, 1 - values / largest.clamp_min(1e-30), torch.zeros_like(values))


@dataclass(frozen=True)
class ZeroProbabilities(Request):
    """How many probabilities of each sample are exactly 0, where a plain a*log(a) gives NaN."""

    needs: ClassVar[tuple[str, ...]] = ("attention probabilities",)

    def meter(self, view: View) -> Meter:
        return _RowMeter(self, view, mean=False)

    def sums(self, weights: torch.Tensor, real: torch.Tensor, valid: torch.Tensor) -> Sums:
        return (((weights == 0) & valid & real.unsqueeze(-1)).flatten(2).sum(-1),)

    def value(self, sums: Sums) -> torch.Tensor:
        return sums[0]


class _RowMeter(Meter):
    """Keeps one number per sample and head: the mean, or the sum, over the applications of a tied site."""

    def __init__(self, request: Entropy | ZeroProbabilities, view: View, *, mean: bool = True) -> None:
        super().__init__(request, view)
        self.sums = view.blank()
        self.applications = torch.zeros(len(view.sites))
        self.mean = mean
        self.so_far: Sums | None = None  # of the blocks of this application

    def rows(self, site: Site, rows: Rows) -> None:
        weights = widened(rows.probabilities)
        real, valid = real_entries(site, self.view, rows)
        copies = self.view.rows.per_sample(site.o, len(weights))
        if copies > 1:  # a sample is several rows of the model, or several windows of its image
            weights, real, valid = (
                part.expand(len(weights), *part.shape[1:]).unflatten(0, (-1, copies)).transpose(1, 2)
                for part in (weights, real, valid)
            )
        block = self.request.sums(weights, real, valid)
        self.so_far = block if rows.first == 0 else tuple(map(torch.add, self.so_far or (), block))
        if rows.first + rows.probabilities.shape[-2] == rows.queries:
            self.sums[:, site.index, list(site.kept)] += self.request.value(self.so_far).to(self.sums)
            self.applications[site.index] += 1

    def answer(self) -> torch.Tensor:
        return self.sums / self.applications.clamp_min(1)[:, None] if self.mean else self.sums
