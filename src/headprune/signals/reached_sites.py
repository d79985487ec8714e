"""Which sites the data reaches: a vision tower does not run on text alone, nor an expert that no token is sent to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.hooks.logit_blocks import few_logits
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.hooks.site_activations import site_callbacks
from headprune.hooks.stop_forward import StopForwardError
from headprune.progress import tracked
from headprune.tasks import Task, own_batches
from headprune.units import Site


def unreached_sites(
    model: PreTrainedModel, sites: Sequence[Site], batches: Iterable[Mapping[str, Any]], task: Task
) -> list[Site]:
    """The sites that no sample of the batches reaches, from forward passes that end as soon as all are reached: for
    most models that of the first batch. Several processes share the batches, and all get the same sites."""
    missing = {site.index for site in sites if site.kept}

    def see(site: Site, columns: torch.Tensor) -> None:
        if has_tokens(columns):
            missing.discard(site.index)
        if not missing:
            raise StopForwardError

    stopping = suppress(StopForwardError)
    with distributed.fail_together():
        for _, _, raw in tracked(own_batches(batches), "finding the sites that samples reach", unit="batch"):
            batch = task.prepare(raw, input_device(model))
            with torch.no_grad(), evaluating(model), site_callbacks(model, sites, output=see), stopping:
                model(**few_logits(model, task.inputs(batch)))
            if not missing:
                break
    everywhere = set.intersection(*distributed.all_gather(missing))
    return [site for site in sites if site.index in everywhere]


def has_tokens(columns: torch.Tensor) -> bool:
    """Whether a site gets any token [.., columns]; an expert may be called without."""
    return columns.shape[:-1].numel() > 0


def named_sites(sites: Sequence[Site]) -> str:
    """Sites in a sentence: the first, and how many more."""
    return f"{sites[0].path}{f' and {len(sites) - 1} more' if len(sites) > 1 else ''}"
