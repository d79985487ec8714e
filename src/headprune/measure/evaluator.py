"""Evaluates a model on held-out batches, reusing outputs of layers that a removal did not change."""

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
from headprune.hooks.logit_blocks import States, forward
from headprune.hooks.module_paths import layer_path
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.measure.predictions import Predictions
from headprune.tasks import Task, own_batches, task_of
from headprune.units import Site

CACHE_BYTES = 1 << 30


class Evaluator:
    """Runs a model over the same batches again and again while heads leave it.

    A layer that did not change and has the same inputs as before has the same outputs. So, within a budget of memory,
    outputs of layers are cached: of those before the first change, and of towers that a change does not reach.
    Several processes share the batches, and all get the predictions of all of them.
    """

    def __init__(
        self, batches: Sequence[Mapping[str, Any]], task: Task | None = None, *, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.batches, self.task = batches, task
        self.cache_bytes = cache_bytes
        self._cached_calls: dict[int, Calls] = {}  # by the batch's number

    def __call__(
        self, model: PreTrainedModel, sites: Sequence[Site], changed: Sequence[int] | None = None
    ) -> Predictions:
        """Evaluate; `changed` are the sites that differ from the last call's model, None if anything may differ."""
        task = self.task or task_of(model)
        cached, self._cached_calls = ({} if changed is None else self._cached_calls), {}
        stale = {layer_path(sites[site].path) for site in changed or ()}
        layers = cacheable_layers(model, sites) if self.cache_bytes > 0 else []
        with distributed.fail_together():
            forward_pass = _Pass(model, task, layers)
            with torch.no_grad(), evaluating(model):
                parts = self._run_batches(forward_pass, cached, stale)
                if (
                    not forward_pass.states.unchanged()
                ):  # a layer changed itself during the pass: the cache is not valid
                    self._cached_calls = {}
                    parts = self._run_batches(_Pass(model, task, []), {}, set())
        return Predictions.over_processes(task, parts)

    def _run_batches(self, forward_pass: _Pass, cached: dict[int, Calls], stale: set[str]) -> dict[int, Predictions]:
        parts: dict[int, Predictions] = {}
        device = input_device(forward_pass.model)
        free = self.cache_bytes
        for number, _, batch in own_batches(self.batches, "evaluating"):
            calls = cached.pop(number, {})
            cache = LayerCache(
                {key: call for key, call in calls.items() if key[0] not in stale}, free, forward_pass.states
            )
            parts[number] = forward_pass.predict(number, forward_pass.task.prepare(batch, device), cache)
            self._cached_calls[number] = cache.calls
            free -= cache.bytes
        return parts

    def clear_cache(self) -> None:
        """Drop all cached outputs: the next model is another one."""
        self._cached_calls = {}


@dataclass
class _Pass:
    """A model as it is, over all batches."""

    model: PreTrainedModel
    task: Task
    layers: Sequence[tuple[str, nn.Module]]  # whose outputs are cached
    states: LayerStates = field(default_factory=LayerStates)

    def predict(self, number: int, batch: Mapping[str, Any], cache: LayerCache) -> Predictions:
        predictions = Predictions(self.task)
        with cache.of(self.layers):
            output = forward(self.model, self.task, self.task.inputs(batch))
        add_output(predictions, batch, output, number)
        return predictions


def add_output(predictions: Predictions, batch: Mapping[str, Any], output: Any, number: int) -> None:
    """Add what `forward` returned for a batch; of `States`, block by block."""
    if isinstance(output, States):
        predictions.add_blocks(batch, output.shape, (_finite_logits(part, number) for part in output.blocks()))
    else:
        predictions.add(batch, output, _finite_logits(predictions.task.logits(output), number))


def _finite_logits(logits: torch.Tensor, number: int) -> torch.Tensor:
    if not torch.isfinite(logits.sum(dtype=torch.float32)) and not torch.isfinite(logits).all():
        raise NonFiniteError(
            f"The model's logits are NaN or Inf in evaluation batch {number}; check that batch and the precision of "
            "the model."
        )
    return logits
