"""Evaluating a model on held-out batches, without computing again what a removal did not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune import distributed
from headprune.errors import NonFiniteError
from headprune.hooks.layer_cache import Calls, LayerCache, LayerStates, cacheable_layers
from headprune.hooks.logits import States, forward
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.hooks.paths import layer_path
from headprune.measure.quality import Quality
from headprune.tasks import Task, own_batches, task_of
from headprune.units import Site

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
        known, self._known = ({} if changed is None else self._known), {}
        stale = {layer_path(sites[site].path) for site in changed or ()}
        layers = cacheable_layers(model, sites) if self.cache_bytes > 0 else []
        with distributed.fail_together():
            once = _Pass(model, task, layers)
            with torch.no_grad(), evaluating(model):
                parts = self._over(once, known, stale)
                if not once.held.intact():  # a layer has changed itself on the way: nothing is taken from memory
                    self._known = {}
                    parts = self._over(_Pass(model, task, []), {}, set())
        return Quality.over_processes(task, parts)

    def _over(self, once: _Pass, known: dict[int, Calls], stale: set[str]) -> dict[int, Quality]:
        parts: dict[int, Quality] = {}
        device = input_device(once.model)
        room = self.cache_bytes
        for number, _, batch in own_batches(self.batches):
            calls = known.pop(number, {})
            cache = LayerCache({key: call for key, call in calls.items() if key[0] not in stale}, room, once.held)
            parts[number] = once.quality(number, once.task.prepare(batch, device), cache)
            self._known[number] = cache.calls
            room -= cache.bytes
        return parts

    def forget(self) -> None:
        """The next model has nothing to do with the last one."""
        self._known = {}


@dataclass
class _Pass:
    """A model as it is, over all batches."""

    model: PreTrainedModel
    task: Task
    layers: Sequence[tuple[str, nn.Module]]  # that remember
    held: LayerStates = field(default_factory=LayerStates)

    def quality(self, number: int, batch: Mapping[str, Any], cache: LayerCache) -> Quality:
        quality = Quality(self.task)
        with cache.of(self.layers):
            output = forward(self.model, self.task, self.task.inputs(batch))
        add_output(quality, batch, output, number)
        return quality


def add_output(quality: Quality, batch: Mapping[str, Any], output: Any, number: int) -> None:
    """Take in what `forward` gave for a batch; of `States`, block by block."""
    if isinstance(output, States):
        quality.add_blocks(batch, output.shape, (_finite_logits(part, number) for part in output.blocks()))
    else:
        quality.add(batch, output, _finite_logits(quality.task.logits(output), number))


def _finite_logits(logits: torch.Tensor, number: int) -> torch.Tensor:
    if not torch.isfinite(logits.sum(dtype=torch.float32)) and not torch.isfinite(logits).all():
        raise NonFiniteError(
            f"The model's logits are NaN or Inf in evaluation batch {number}; check that batch and the precision of "
            "the model."
        )
    return logits
