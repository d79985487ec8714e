"""Evaluating a model on held-out batches, without computing again what a removal did not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.errors import NonFiniteError
from headprune.hooks.outputs import evaluating
from headprune.hooks.watch import captured_outputs, replayed
from headprune.measure.quality import Quality
from headprune.task import Task, task_of
from headprune.units import AttentionSite
from headprune.units.paths import layer_path

CACHE_BYTES = 1 << 30


class Evaluator:
    """Runs a model over the same batches again and again while heads leave it.

    Layers below the lowest one that changed give the same outputs for the same data, so their outputs are kept, within
    a budget of memory, and handed out instead of being computed.
    """

    def __init__(
        self, batches: Sequence[Mapping[str, Any]], task: Task | None = None, *, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self.batches, self.task = batches, task
        self.cache_bytes = cache_bytes
        self._kept: list[dict[str, Any]] | None = None

    def __call__(
        self, model: PreTrainedModel, sites: Sequence[AttentionSite], changed: Sequence[int] | None = None
    ) -> Quality:
        """Evaluate; `changed` are the sites that differ from the last call's model, None if anything may differ."""
        task = self.task or task_of(model)
        quality = Quality(task)
        device = next(model.parameters()).device
        layers = self._layers(model, sites)
        first = self._first_changed(layers, sites, changed)
        known, self._kept = self._kept, []
        room = self.cache_bytes
        with torch.no_grad(), evaluating(model):
            for number, batch in enumerate(self.batches):
                inputs = task.prepare(batch, device)
                below = layers[:first] if known else []
                with ExitStack() as stack:
                    fresh: dict[str, Any] = {}
                    if below and known:
                        stack.enter_context(replayed([(model.get_submodule(p), known[number][p]) for p in below]))
                    if room > 0:
                        watched = [path for path in layers if path not in below]
                        stack.enter_context(
                            captured_outputs([(path, model.get_submodule(path)) for path in watched], fresh)
                        )
                    output = model(**task.inputs(inputs))
                logits = task.logits(output)
                if not torch.isfinite(logits.sum(dtype=torch.float32)) and not torch.isfinite(logits).all():
                    raise NonFiniteError(
                        f"The model's logits are NaN or Inf in evaluation batch {number}; check that batch and the "
                        "precision of the model."
                    )
                quality.add(inputs, output, logits)
                kept = {**({path: known[number][path] for path in below} if known else {}), **fresh}
                room -= sum(_bytes(value) for value in kept.values())
                self._kept.append(kept)
        if room <= 0 or not layers:
            self._kept = None
        return quality

    def forget(self) -> None:
        """The next model has nothing to do with the last one."""
        self._kept = None

    def _layers(self, model: PreTrainedModel, sites: Sequence[AttentionSite]) -> list[str]:
        """The layers in order of execution; none where a layer runs more than once per pass (ALBERT)."""
        if self.cache_bytes <= 0 or any(site.applications > 1 for site in sites):
            return []
        paths = list(dict.fromkeys(layer_path(site.path) for site in sites))
        return paths if all(isinstance(model.get_submodule(path), nn.Module) for path in paths) else []

    def _first_changed(
        self, layers: Sequence[str], sites: Sequence[AttentionSite], changed: Sequence[int] | None
    ) -> int:
        if changed is None or not layers:
            return 0
        return min((layers.index(layer_path(sites[site].path)) for site in changed), default=len(layers))


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(part) for part in value) if isinstance(value, (tuple, list)) else 0
