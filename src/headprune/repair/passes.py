"""Forward passes that go as far as one site, and compute no layer again that has not changed since the last one.

Repairing a model front to back asks for the input of every output map in turn. Layers before it are as they were, so
they answer from memory: a whole sweep costs a few forward passes and not one for every site.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.hooks.outputs import evaluating
from headprune.hooks.recall import Calls, Recall
from headprune.hooks.watch import hooks
from headprune.signals.moments import real_outputs
from headprune.task import Task, batch_size
from headprune.units import Site
from headprune.units.paths import layer_path

MEMORY = 4 << 30  # bytes of layer outputs that are remembered


class _FarEnoughError(Exception):
    """What was asked for has been seen, so the rest of the forward pass is not needed."""


class Passes:
    """Passes of one model over the same batches, again and again, while its sites change one after the other."""

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[Site],
        batches: Sequence[Mapping[str, Any]],
        task: Task,
        *,
        memory: int = MEMORY,
    ) -> None:
        self.model, self.batches, self.task = model, batches, task
        self.memory = memory
        again = {layer_path(site.path) for site in sites if site.applications > 1}
        self.layers = [path for path in dict.fromkeys(layer_path(site.path) for site in sites) if path not in again]
        self._known: dict[int, Calls] = {}
        self._runs = 0  # of layers on whole batches

    @property
    def forwards(self) -> float:
        """How many forward passes over all the data these were, counted in layers."""
        return self._runs / max(1, len(self.layers) * len(self.batches))

    def at(self, site: Site) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each batch what the output map of this site is given for real tokens, all applications after one
        another, [tokens x columns], and the number of the sample each token belongs to."""
        first = 0
        with torch.no_grad(), evaluating(self.model):
            room = self.memory
            known, self._known = self._known, {}
            for number, raw in enumerate(self.batches):
                batch = self.task.prepare(raw, next(self.model.parameters()).device)
                seen: list[torch.Tensor] = []
                recall = Recall(known.pop(number, {}), room)
                layers = [(path, self.model.get_submodule(path)) for path in self.layers]
                with recall.of(layers), self._until(site, seen), suppress(_FarEnoughError):
                    self.model(**self.task.inputs(batch))
                self._known[number] = recall.calls
                self._runs += recall.computed
                room -= recall.bytes
                parts = [real_outputs(site, batch, columns, self.task) for columns in seen]
                rows = torch.cat([own for _, own in parts]) + first if parts else torch.zeros(0, dtype=torch.long)
                first += batch_size(batch)
                if parts:
                    yield torch.cat([tokens for tokens, _ in parts]), rows

    @contextmanager
    def _until(self, site: Site, seen: list[torch.Tensor]) -> Iterator[None]:
        def look(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            seen.append(args[0])
            if len(seen) == site.applications:
                raise _FarEnoughError

        with hooks([(self.model.get_submodule(site.o), look)], before=True):
            yield


def given_outputs(
    model: PreTrainedModel, sites: Sequence[Site], batches: Sequence[Mapping[str, Any]], task: Task
) -> dict[int, list[torch.Tensor]]:
    """What the output map of each site gives for real tokens, batch after batch, from one forward pass; the sites are
    in the order in which they run."""
    found: dict[int, list[torch.Tensor]] = {}
    for raw in batches:
        batch = task.prepare(raw, next(model.parameters()).device)
        seen: dict[int, list[torch.Tensor]] = {}

        def keep(site: Site, seen: dict = seen, batch: dict = batch) -> Callable[..., None]:
            def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
                seen.setdefault(site.index, []).append(real_outputs(site, batch, output, task)[0].cpu())

            return note

        pairs = [(model.get_submodule(site.o), keep(site)) for site in sites]
        with torch.no_grad(), evaluating(model), hooks(pairs):
            model(**task.inputs(batch))
        for index, parts in seen.items():
            found.setdefault(index, []).append(torch.cat(parts))
    return found
