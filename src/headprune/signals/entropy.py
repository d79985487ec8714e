"""Entropy of attention rows, reduced as each site's probabilities go by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headprune.signals.requests import Entropy, EntropyDeficit, Request, ZeroProbabilities
from headprune.task.objectives import is_seq2seq, query_tokens, token_mask
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
    site: AttentionSite, batch: Mapping[str, Any], weights: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Real query rows [batch, 1, queries], and per row the keys it may look at [.., queries, keys]."""
    queries, keys = weights.shape[-2:]
    decoder = is_seq2seq(batch) and site.stack == "decoder"
    query_mask = query_tokens(site, batch)
    key_mask = query_mask
    if site.attention == "cross":
        key_mask = token_mask(batch, decoder=False) if decoder else batch.get("encoder_attention_mask")
    valid = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=weights.device)
    if mask is not None:
        valid = valid & (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2)
    if key_mask is not None and key_mask.shape[1] == keys:
        valid = valid & key_mask.bool()[:, None, None, :]
    rows = torch.ones(weights.shape[0], 1, queries, dtype=torch.bool, device=weights.device)
    if query_mask is not None and query_mask.shape[1] == queries:
        rows = query_mask[:, None, :]
    return rows, valid


class EntropyMeter:
    """A callback for `probe.probabilities` that keeps one number per sample and head."""

    def __init__(
        self, sites: Sequence[AttentionSite], requests: Sequence[Request], batch: Mapping[str, Any], size: int
    ) -> None:
        self.requests = requests
        self.batch = batch
        self.applications = {site.index: 0 for site in sites}
        shape = (size, len(sites), max((site.original_heads for site in sites), default=0))
        self._sums = {request: torch.full(shape, torch.nan) for request in requests}

    def __call__(self, site: AttentionSite, probabilities: torch.Tensor, mask: torch.Tensor | None) -> None:
        weights = probabilities.float()
        rows, valid = real_entries(site, self.batch, weights, mask)
        kept = list(site.kept)
        for request in self.requests:
            if isinstance(request, Entropy):
                entropies = row_entropies(weights, valid, request.variant, request.epsilon)
                values = (entropies * rows).sum(-1) / rows.sum(-1).clamp_min(1)
                if isinstance(request, EntropyDeficit):
                    # Rows are compared with the longest row they could have: all the sample's real keys.
                    longest = (valid & rows.unsqueeze(-1)).any(-2).sum(-1).clamp_min(1).log()
                    values = torch.where(longest > 0, 1 - values / longest, torch.zeros_like(values))
            else:
                values = ((weights == 0) & valid & rows.unsqueeze(-1)).sum(dim=(-1, -2)).float()
            total = self._sums[request]
            before = total[:, site.index, kept].nan_to_num(0.0)
            total[:, site.index, kept] = before + values.to(total)
        self.applications[site.index] += 1

    def answers(self) -> dict[Request, torch.Tensor]:
        """Means over the applications of a tied site; counts of zeros are sums."""
        times = torch.tensor([max(1, self.applications[index]) for index in sorted(self.applications)])
        return {
            request: total if isinstance(request, ZeroProbabilities) else total / times[:, None]
            for request, total in self._sums.items()
        }
