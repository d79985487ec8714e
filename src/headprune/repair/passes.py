"""Forward passes that go as far as one site, and compute no layer again that has not changed since the last one.

Repairing a model front to back asks for the input of every output map in turn. Layers before it are as they were, so
they answer from memory: a whole sweep costs a few forward passes and not one for every site.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.hooks.attach import hooks
from headprune.hooks.logits import few_logits
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.hooks.recall import Calls, Recall, remembering
from headprune.hooks.streams import streams as streams_of
from headprune.signals.moments import real_outputs
from headprune.tasks import Task, own_batches
from headprune.units import Site

MEMORY = 4 << 30  # bytes of layer outputs that are remembered


class FarEnoughError(Exception):
    """What was asked for has been seen, so the rest of the forward pass is not needed."""


class SitePasses(Protocol):
    """Passes over the same batches that go as far as one site."""

    def at(self, site: Site, *, streams: bool = False) -> Iterator[Seen]:
        """What passes at this site for real tokens, batch after batch, all applications after one another."""


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
        self.model, self.task = model, task
        self.batches = list(own_batches(batches))  # those that this process goes over
        self.memory = memory
        self.layers = [path for path, _ in remembering(model, sites)]
        self._known: dict[int, Calls] = {}
        self._runs = 0  # of layers on whole batches

    @property
    def forwards(self) -> float:
        """How many forward passes over all the data these were, counted in layers."""
        return self._runs / max(1, len(self.layers) * len(self.batches))

    def at(self, site: Site, *, streams: bool = False) -> Iterator[Seen]:
        """What passes at this site for real tokens, batch after batch, all applications after one another."""
        with torch.no_grad(), evaluating(self.model):
            room = self.memory
            known, self._known = self._known, {}
            for number, first, raw in self.batches:
                batch = self.task.prepare(raw, input_device(self.model))
                recall = Recall(known.pop(number, {}), room)
                layers = [(path, self.model.get_submodule(path)) for path in self.layers]
                look = Look(site, streams)
                with recall.of(layers), look.on(self.model), suppress(FarEnoughError):
                    self.model(**few_logits(self.model, self.task.inputs(batch)))
                self._known[number] = recall.calls
                self._runs += recall.computed
                room -= recall.bytes
                yield look.seen(batch, self.task, first)


@dataclass(frozen=True)
class Seen:
    """Real tokens of one batch at one site."""

    columns: torch.Tensor  # [tokens x in]: what the output map is given
    stream: torch.Tensor | None  # [tokens x out]: what its output is added to, if that was asked for
    samples: torch.Tensor  # [tokens]: the number of the sample in all the data


class Look:
    """Keeps what a site is given, and the stream that it adds to, and ends the pass when it has seen enough."""

    def __init__(self, site: Site, streams: bool) -> None:
        self.site, self.streams = site, streams
        self.columns: list[torch.Tensor] = []
        self.stream: list[torch.Tensor] = []

    @contextmanager
    def on(self, model: nn.Module) -> Iterator[None]:
        def given(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            self.columns.append(args[0])
            if not self.streams and len(self.columns) == self.site.applications:
                raise FarEnoughError

        def added(site: Site, stream: torch.Tensor) -> None:
            self.stream.append(stream)
            if len(self.stream) == self.site.applications:
                raise FarEnoughError

        with hooks([(model.get_submodule(self.site.o), given)], before=True):
            if self.streams:
                with streams_of(model, [self.site], added):
                    yield
            else:
                yield

    def seen(self, batch: Mapping[str, Any], task: Task, first: int) -> Seen:
        parts = [real_outputs(self.site, batch, columns, task) for columns in self.columns]
        stream = [real_outputs(self.site, batch, stream, task)[0] for stream in self.stream]
        if not parts:  # an expert that no token was sent to
            nothing = torch.zeros(0, dtype=torch.long)
            return Seen(torch.zeros(0, self.site.size * self.site.width), None, nothing)
        return Seen(
            torch.cat([tokens for tokens, _ in parts]),
            torch.cat(stream) if stream else None,
            torch.cat([rows for _, rows in parts]) + first,
        )
