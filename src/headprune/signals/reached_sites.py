"""Which sites the data reaches: a vision tower does not run on text alone, nor an expert that no token is sent to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.batches import batch_size
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
    with distributed.fail_together():
        for _, _, raw in tracked(own_batches(batches), "finding the sites that samples reach", unit="batch"):
            batch = task.prepare(raw, input_device(model))
            seen = Reached(task, batch)

            def see(site: Site, columns: torch.Tensor, seen: Reached = seen, missing: set[int] = missing) -> None:
                seen.add(site, columns)
                if not missing - seen.sites:
                    raise StopForwardError

            with (
                torch.no_grad(),
                evaluating(model),
                site_callbacks(model, sites, output=see),
                suppress(StopForwardError),
            ):
                model(**few_logits(model, task.inputs(batch)))
            missing -= seen.sites
            missing -= reached_without_padding(model, sites, missing & seen.uncertain, batch, task)
            if not missing:
                break
    everywhere = set.intersection(*distributed.all_gather(missing))
    return [site for site in sites if site.index in everywhere]


class Reached:
    """The sites that tokens of a batch reach. The tokens of an expert do not say where they come from: no more of them
    than the batch has padding may all be padding."""

    def __init__(self, task: Task, batch: Mapping[str, Any]) -> None:
        self.task, self.batch = task, batch
        masks = [task.token_mask(batch, decoder=decoder) for decoder in (False, True)]
        self.padding = max((int((~mask).sum()) for mask in masks if mask is not None), default=0)
        self.sites: set[int] = set()
        self.uncertain: set[int] = set()

    def add(self, site: Site, columns: torch.Tensor) -> None:
        """Note a call of a site, with the tokens [.., columns] that it gets; an expert may be called without."""
        shape = columns.shape[:-1]
        if not shape.numel() or site.index in self.sites:
            return
        certain = shape.numel() > self.padding
        if not certain and len(shape) == 2:  # rows of tokens, as in the batch
            mask = self.task.site_tokens(site, self.batch, shape[1])
            certain = mask is None or (mask.shape == shape and bool(mask.any()))
        (self.sites if certain else self.uncertain).add(site.index)


def reached_without_padding(
    model: PreTrainedModel, sites: Sequence[Site], uncertain: Iterable[int], batch: Mapping[str, Any], task: Task
) -> set[int]:
    """Which of the uncertain sites the prepared batch reaches when its samples run without their padding, one by
    one."""
    missing = {*uncertain}
    if not missing:
        return set()
    watched = [site for site in sites if site.index in missing]

    def see(site: Site, columns: torch.Tensor) -> None:
        if columns.shape[:-1].numel():
            missing.discard(site.index)

    for row in range(batch_size(batch)):
        sample = _without_padding(task.select(batch, slice(row, row + 1)), task)
        with torch.no_grad(), evaluating(model), site_callbacks(model, watched, output=see):
            model(**few_logits(model, task.inputs(sample)))
        if not missing:
            break
    return {site.index for site in watched} - missing


def _without_padding(sample: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """One sample with its real tokens alone, in all entries that have a number per token."""
    masks = [task.token_mask(sample, decoder=decoder) for decoder in (False, True)]
    result = dict(sample)
    for mask in masks:
        if mask is None or mask.dim() != 2:
            continue
        for name, value in sample.items():
            if not isinstance(value, torch.Tensor) or value.shape[:2] != mask.shape:
                continue
            # Two stacks of one length differ in the names of their entries.
            of_decoder = "decoder" in name or name == "labels"
            if masks[1] is None or of_decoder == (mask is masks[1]):
                result[name] = value[:, mask[0]]
    return result


def named_sites(sites: Sequence[Site]) -> str:
    """Sites in a sentence: the first, and how many more."""
    return f"{sites[0].path}{f' and {len(sites) - 1} more' if len(sites) > 1 else ''}"
