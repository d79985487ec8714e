"""Self-attention attribution (Hao et al. 2021): integrated gradients of the label's probability along scaled attention.

Attr = A * mean_k dF/dA at (k/m) A, with the attention of one site replaced and the others as they come. The output of
a head is Z = A V, so the replacement is (k/m) A V and dF/dA = (dF/dZ) V^T: no probabilities are differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.errors import DataError
from headprune.hooks.outputs import evaluating
from headprune.hooks.probe import probabilities
from headprune.hooks.watch import frozen, hooks, watched
from headprune.signals.entropy import real_entries
from headprune.signals.requests import Attribution
from headprune.task.objectives import (
    Labels,
    batch_size,
    label_probabilities,
    logits_of,
    model_inputs,
    targets_of,
)
from headprune.units import AttentionSite


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
    with evaluating(model), frozen(model), torch.enable_grad():
        for site in sites:
            if site.kept:
                values = _site_attribution(model, site, batch, request.steps, labels)
                result[:, site.index, list(site.kept)] = values.cpu()
    return result


def _site_attribution(
    model: PreTrainedModel,
    site: AttentionSite,
    batch: Mapping[str, Any],
    steps: int,
    labels: Labels,
) -> torch.Tensor:
    inputs = model_inputs(model, batch)
    maps: list[tuple[torch.Tensor, torch.Tensor]] = []
    with (
        torch.no_grad(),
        probabilities(
            model, [site], lambda _, weights, mask: maps.append((weights, _counted(site, batch, weights, mask)))
        ),
    ):
        logits = logits_of(model(**inputs))
        targets = targets_of(model, batch, logits, labels)
    if targets is None or targets.is_floating_point():
        raise DataError('Attribution needs a label per sample; add "labels", or use labels="self".')
    sums = [torch.zeros_like(weights, dtype=torch.float32) for weights, _ in maps]
    for step in range(1, steps + 1):
        # Later applications of a tied site see other values than in the unchanged run: those of this run count.
        values: list[torch.Tensor] = []
        outputs: list[torch.Tensor] = []
        with (
            watched(model, [site], projection=_collector(site, values)),
            hooks(
                [(model.get_submodule(site.o), _replacement(site, step / steps, maps, values, outputs))],
                before=True,
                first=True,
            ),
        ):
            scalar = label_probabilities(logits_of(model(**inputs)), targets).sum()
        for place, gradient in enumerate(torch.autograd.grad(scalar, outputs)):
            heads = gradient.float().unflatten(-1, (site.heads, -1)).transpose(1, 2)
            own = _by_head(site, values[place]).detach().float()
            sums[place] += heads @ own.transpose(-1, -2) / steps
    best: torch.Tensor | None = None
    for (weights, counted), mean in zip(maps, sums, strict=True):
        attribution = weights.float() * mean
        largest = attribution.masked_fill(~counted, -torch.inf).flatten(2).max(-1).values
        best = largest if best is None else torch.maximum(best, largest)
    assert best is not None
    return best


def _collector(
    site: AttentionSite, values: list[torch.Tensor]
) -> Callable[[AttentionSite, str, torch.Tensor, torch.Tensor], None]:
    def collect(_: AttentionSite, path: str, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        if path == site.v.module:
            values.append(outputs)

    return collect


def _replacement(
    site: AttentionSite,
    scale: float,
    maps: Sequence[tuple[torch.Tensor, torch.Tensor]],
    values: Sequence[torch.Tensor],
    outputs: list[torch.Tensor],
) -> Callable[..., Any]:
    """A pre-hook of the output projection that puts the scaled attention of the unchanged run in its place."""

    def replace(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        weights, _ = maps[len(outputs)]
        heads = (scale * weights).to(args[0].dtype) @ _by_head(site, values[len(outputs)])
        outputs.append(heads.transpose(1, 2).reshape(args[0].shape))
        return (outputs[-1], *args[1:])

    return replace


def _by_head(site: AttentionSite, projected: torch.Tensor) -> torch.Tensor:
    """Values [batch, query heads, keys, width] from the output of the value projection."""
    return site.v.of(projected).transpose(1, 2).repeat_interleave(site.group, dim=1)


def _counted(
    site: AttentionSite, batch: Mapping[str, Any], weights: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    rows, valid = real_entries(site, batch, weights, mask)
    return valid & rows.unsqueeze(-1)
