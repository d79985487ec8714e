"""Evaluating a model on held-out batches, without computing again what a removal did not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune import ranks
from headprune.errors import NonFiniteError
from headprune.hooks.logits import states
from headprune.hooks.outputs import evaluating
from headprune.hooks.recall import Calls, Recall
from headprune.measure.quality import Quality
from headprune.task import Task, own_batches, task_of
from headprune.units import Site
from headprune.units.offload import input_device
from headprune.units.paths import layer_path

CACHE_BYTES = 1 << 30


class Evaluator:
    """Runs a model over the same batches again and again while heads leave it.

    A layer that did not change and gets what it got before gives what it gave before. So, within a budget of memory,
    layers remember their outputs: those that run before the first change, and towers that a change does not reach.
    Several processes share the batches, and all get the quality over all of them.
    """

    def __init__(
        self, batches: Sequence[Mapping[str, Any]], task: Task | None = None, *, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.batches, self.task = batches, task
        self.cache_bytes = cache_bytes
        self._known: dict[int, Calls] = {}  # by the batch's number

    def __call__(self, model: PreTrainedModel, sites: Sequence[Site], changed: Sequence[int] | None = None) -> Quality:
        """Evaluate; `changed` are the sites that differ from the last call's model, None if anything may differ."""
        task = self.task or task_of(model)
        parts: dict[int, Quality] = {}
        device = input_device(model)
        layers = self._layers(model, sites)
        stale = {layer_path(sites[site].path) for site in changed or ()}
        known, self._known = ({} if changed is None else self._known), {}
        room = self.cache_bytes
        with ranks.agreeing(), torch.no_grad(), evaluating(model):
            for number, _, batch in own_batches(self.batches):
                inputs = task.prepare(batch, device)
                calls = known.pop(number, {})
                recall = Recall({key: call for key, call in calls.items() if key[0] not in stale}, room)
                with recall.of(layers):
                    large = states(model, task, task.inputs(inputs))
                    output = model(**task.inputs(inputs)) if large is None else None
                parts[number] = Quality(task)
                if large is not None:
                    parts[number].add_blocks(
                        inputs, large.shape, (finite_logits(part, number) for part in large.blocks())
                    )
                else:
                    parts[number].add(inputs, output, finite_logits(task.logits(output), number))
                del output, large
                self._known[number] = recall.calls
                room -= recall.bytes
        return Quality.over_processes(task, parts)

    def forget(self) -> None:
        """The next model has nothing to do with the last one."""
        self._known = {}

    def _layers(self, model: PreTrainedModel, sites: Sequence[Site]) -> list[tuple[str, nn.Module]]:
        """The layers with sites. One that runs again and again in a pass (ALBERT's) changes as a whole, if it does, and
        would fill the memory for nothing."""
        if self.cache_bytes <= 0:
            return []
        again = {layer_path(site.path) for site in sites if site.applications > 1}
        paths = dict.fromkeys(layer_path(site.path) for site in sites)
        return [(path, model.get_submodule(path)) for path in paths if path not in again]


def finite_logits(logits: torch.Tensor, number: int) -> torch.Tensor:
    if not torch.isfinite(logits.sum(dtype=torch.float32)) and not torch.isfinite(logits).all():
        raise NonFiniteError(
            f"The model's logits are NaN or Inf in evaluation batch {number}; check that batch and the precision of "
            "the model."
        )
    return logits
