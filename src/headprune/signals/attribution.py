"""Self-attention attribution (Hao et al. 2021): integrated gradients of the label's probability along scaled attention.

Attr = A * mean_k dF/dA at (k/m) A, with the attention of one site scaled and the others as they are. The output of a
head is A V, so scaling A is scaling that output, and dF/dA = (dF/dZ) V^T: no probabilities are differentiated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.errors import DataError
from headprune.instrument import frozen, gated, watched
from headprune.outputs import evaluating
from headprune.probe import probabilities
from headprune.signals.entropy import real_entries
from headprune.signals.objectives import (
    Labels,
    batch_size,
    label_probabilities,
    logits_of,
    model_inputs,
    targets_of,
)
from headprune.signals.requests import Attribution
from headprune.sites import AttentionSite


def attributions(
    model: PreTrainedModel,
    sites: Sequence[AttentionSite],
    batch: Mapping[str, Any],
    request: Attribution,
    labels: Labels,
) -> torch.Tensor:
    """The largest attribution of each sample and head: [batch x sites x heads], NaN at heads that are gone."""
    heads = max(site.original_heads for site in sites)
    result = torch.full((batch_size(batch), len(sites), heads), torch.nan)
    with evaluating(model), frozen(model):
        for site in sites:
            if site.kept:
                values = _site_attribution(model, sites, site, batch, request.steps, labels)
                result[:, site.index, list(site.kept)] = values.cpu()
    return result


def _site_attribution(
    model: PreTrainedModel,
    sites: Sequence[AttentionSite],
    site: AttentionSite,
    batch: Mapping[str, Any],
    steps: int,
    labels: Labels,
) -> torch.Tensor:
    inputs = model_inputs(model, batch)
    device = next(model.parameters()).device
    maps: list[tuple[torch.Tensor, torch.Tensor]] = []
    values: list[torch.Tensor] = []
    with (
        torch.no_grad(),
        watched(
            model,
            [site],
            projection=lambda _, path, __, outputs: values.append(outputs) if path == site.v.module else None,
        ),
        probabilities(
            model, [site], lambda _, weights, mask: maps.append((weights, _counted(site, batch, weights, mask)))
        ),
    ):
        logits = logits_of(model(**inputs))
        targets = targets_of(model, batch, logits, labels)
    if targets is None or targets.is_floating_point():
        raise DataError('Attribution needs a label per sample; add "labels", or use labels="self".')
    gradients = [torch.zeros(()) for _ in maps]
    for step in range(1, steps + 1):
        gates = torch.ones(len(sites), max(s.original_heads for s in sites), device=device)
        gates[site.index] = step / steps
        outputs: list[torch.Tensor] = []

        def keep(_: AttentionSite, heads: torch.Tensor, outputs: list[torch.Tensor] = outputs) -> None:
            outputs.append(heads)

        with gated(model, gates, sites=sites), watched(model, [site], output=keep):
            scalar = label_probabilities(logits_of(model(**inputs)), targets).sum()
        for place, gradient in enumerate(torch.autograd.grad(scalar, outputs)):
            gradients[place] = gradients[place].to(gradient) + gradient / steps
    best: torch.Tensor | None = None
    for (weights, counted), outputs_v, gradient in zip(maps, values, gradients, strict=True):
        heads = gradient.float().unflatten(-1, (site.heads, -1)).transpose(1, 2)
        own = site.v.of(outputs_v).float().transpose(1, 2).repeat_interleave(site.group, dim=1)
        attribution = weights.float() * (heads @ own.transpose(-1, -2))
        largest = attribution.masked_fill(~counted, -torch.inf).flatten(2).max(-1).values
        best = largest if best is None else torch.maximum(best, largest)
    assert best is not None
    return best


def _counted(
    site: AttentionSite, batch: Mapping[str, Any], weights: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    rows, valid = real_entries(site, batch, weights, mask)
    return valid & rows.unsqueeze(-1)
