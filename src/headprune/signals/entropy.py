"""Entropy of attention rows, reduced as each site's probabilities go by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from headprune.signals.spec import Meter, Request, View
from headprune.units import AttentionSite


def row_entropies(probabilities: torch.Tensor, valid: torch.Tensor, variant: str, epsilon: float) -> torch.Tensor:
    """Entropy of each row over its valid keys: A is -sum a log a, B adds epsilon inside the log, C also before it."""
    if variant == "A":
        terms = torch.special.entr(probabilities)
    elif variant == "B":
        terms = -probabilities * (probabilities + epsilon).log()
    else:
        terms = torch.special.entr(probabilities + epsilon)
    return (terms * valid).sum(-1)


def real_entries(
    site: AttentionSite, view: View, weights: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Real query rows [rows, 1, queries], and per row the keys it may look at [.., queries, keys]."""
    queries, keys = weights.shape[-2:]
    task, batch = view.task, view.batch
    query_mask = task.site_tokens(site, batch, queries)
    key_mask = task.key_tokens(site, batch, keys)
    valid = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=weights.device)
    if mask is not None:
        valid = valid & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)
    if key_mask is not None and key_mask.shape == (weights.shape[0], keys):
        valid = valid & key_mask[:, None, None, :]
    rows = torch.ones(weights.shape[0], 1, queries, dtype=torch.bool, device=weights.device)
    if query_mask is not None and query_mask.shape == (weights.shape[0], queries):
        rows = query_mask[:, None, :]
    return rows, valid


@dataclass(frozen=True)
class Entropy(Request):
    """Mean entropy of the attention rows of each sample's real tokens; variants as in METHODS of arXiv 2602.04491."""

    needs: ClassVar[tuple[str, ...]] = ("attention probabilities",)
    variant: Literal["A", "B", "C"] = "C"
    epsilon: float = 1e-7

    def meter(self, view: View) -> Meter:
        return _RowMeter(self, view)

    def measure(self, weights: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """From probabilities [samples, heads, .., queries, keys] a number per sample and head."""
        entropies = row_entropies(weights, valid, self.variant, self.epsilon)
        real = rows.expand(len(weights), *rows.shape[1:])
        return (entropies * real).flatten(2).sum(-1) / real.flatten(2).sum(-1).clamp_min(1)


@dataclass(frozen=True)
class EntropyDeficit(Entropy):
    """1 - entropy / log(t) of each sample of t tokens; a sample of one token has no deficit."""

    def measure(self, weights: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        # Rows are compared with the longest row they could have: all the sample's real keys.
        longest = (valid & rows.unsqueeze(-1)).any(-2).sum(-1).clamp_min(1).float().log()
        longest = longest.flatten(2).mean(-1) if longest.dim() > 2 else longest
        values = super().measure(weights, rows, valid)
        return torch.where(longest > 0, 1 - values / longest.clamp_min(1e-30), torch.zeros_like(values))


@dataclass(frozen=True)
class ZeroProbabilities(Request):
    """How many probabilities of each sample are exactly 0, where a plain a*log(a) gives NaN."""

    needs: ClassVar[tuple[str, ...]] = ("attention probabilities",)

    def meter(self, view: View) -> Meter:
        return _RowMeter(self, view, mean=False)

    def measure(self, weights: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return ((weights == 0) & valid & rows.unsqueeze(-1)).flatten(2).sum(-1).float()


class _RowMeter(Meter):
    """Keeps one number per sample and head: the mean, or the sum, over the applications of a tied site."""

    def __init__(self, request: Entropy | ZeroProbabilities, view: View, *, mean: bool = True) -> None:
        super().__init__(request, view)
        self.sums = view.blank()
        self.applications = torch.zeros(len(view.sites))
        self.mean = mean

    def probabilities(self, site: AttentionSite, probabilities: torch.Tensor, mask: torch.Tensor | None) -> None:
        weights = probabilities.float()
        rows, valid = real_entries(site, self.view, weights, mask)
        copies = self.view.task.rows(self.view.batch)
        if copies > 1:  # a sample is several rows of the model: its attention is theirs together
            weights, rows, valid = (
                part.expand(len(weights), *part.shape[1:]).unflatten(0, (-1, copies)).transpose(1, 2)
                for part in (weights, rows, valid)
            )
        values = self.request.measure(weights, rows, valid)
        self.sums[:, site.index, list(site.kept)] += values.to(self.sums)
        self.applications[site.index] += 1

    def answer(self) -> torch.Tensor:
        return self.sums / self.applications.clamp_min(1)[:, None] if self.mean else self.sums
