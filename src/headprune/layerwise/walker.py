"""Walking through a model layer after layer: where every batch has got to, in the dense model and in the pruned one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.hooks.calls import (
    Recorded,
    UnfollowableError,
    filled,
    first_reached,
    gives,
    record,
    standing_in,
    stream_in,
)
from headprune.hooks.logits import few_logits
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.hooks.paths import layer_path
from headprune.hooks.stop import StopForwardError
from headprune.layerwise.activation_store import ActivationStore
from headprune.layerwise.site_tokens import SiteTokens, SiteWatch
from headprune.tasks import Task, batch_size
from headprune.units import Site

Which = Literal["dense", "pruned"]


class LayerWeights(Protocol):
    """Where the weights of layers are while it is not their turn."""

    def fetch(self, path: str) -> None:
        """The layer at this path gets its dense weights."""

    def outside(self) -> AbstractContextManager[None]:
        """What is no layer has its weights for the length of the block."""

    def put_back(self, path: str) -> None:
        """The weights of this layer are not needed now."""


class InMemory:
    """Everything is there all the time."""

    def fetch(self, path: str) -> None:
        pass

    @contextmanager
    def outside(self) -> Iterator[None]:
        yield

    def put_back(self, path: str) -> None:
        pass


@dataclass(frozen=True)
class Layer:
    """A layer whose turn it is."""

    path: str
    module: nn.Module
    sites: tuple[Site, ...]  # by their indices; in the order of running only the pass tells
    place: int  # in its stack


@dataclass(frozen=True)
class _Done:
    """A stack that has run: what its last layer gave for every batch, and what each of them gave it in."""

    paths: tuple[str, ...]
    forms: Mapping[Which, Sequence[Any]]
    streams: Mapping[Which, ActivationStore]


class Walker:
    """Takes all batches through one layer after the other.

    `calibration` batches come first, and the others only pass through. `first_samples` are the numbers that the first
    samples of batches have in all the data; they count from 0 unless said otherwise. Without `stacks`, every site takes
    a pass of the whole model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[Site],
        batches: Sequence[Mapping[str, Any]],
        task: Task,
        *,
        weights: LayerWeights | None = None,
        calibration: int | None = None,
        first_samples: Sequence[int] | None = None,
        device: torch.device | None = None,
        scratch: Path | None = None,
        which: Sequence[Which] = ("dense", "pruned"),
        stacks: Mapping[str, list[str]] | None = None,
    ) -> None:
        self.model, self.sites, self.batches, self.task = model, sites, batches, task
        self.weights: LayerWeights = weights or InMemory()
        self.calibration = len(batches) if calibration is None else calibration
        counted = list(itertools.accumulate(map(batch_size, batches), initial=0))
        self.first_samples = counted if first_samples is None else first_samples
        self.device = device or input_device(model)
        self.which = tuple(which)
        self.scratch = scratch
        self.streams: dict[Which, ActivationStore] = {}
        self.current: Layer | None = None
        self._waiting = dict(stacks_of(model, sites) if stacks is None else stacks)  # that have not begun
        self._stack: tuple[str, ...] = ()  # that runs
        self._ahead: list[str] = []  # layers of it that have not had their turn
        self._records: dict[Which, list[Recorded]] = {}
        self._done: list[_Done] = []

    # --- layer after layer ---

    def layers(self) -> Iterator[Layer]:
        """Every layer in its turn, with its dense weights there. Whoever takes it has to `advance` the streams before
        the next; it is put back then."""
        while self.enter():
            assert self.current is not None
            yield self.current

    def enter(self) -> bool:
        """Go on to the next layer, if there is one that runs."""
        self.leave()
        if not self._ahead:
            name = self._next()
            if not name:
                return False  # what is left does not run
            self._stack = tuple(self._waiting.pop(name))
            self.weights.fetch(self._stack[0])
            with self.weights.outside():
                self._begin([path for stack in self._waiting.values() for path in stack])
            self._ahead = list(self._stack)
        else:
            self.weights.fetch(self._ahead[0])
        place = len(self._stack) - len(self._ahead)
        path = self._ahead.pop(0)
        own = tuple(site for site in self.sites if layer_path(site.path) == path)
        self.current = Layer(path, self.model.get_submodule(path), own, place)
        return True

    def leave(self) -> None:
        """Put the layer back, and end its stack behind the last."""
        if self.current is not None:
            self.weights.put_back(self.current.path)
            self.current = None
            if not self._ahead:
                forms = {which: [own.form for own in records] for which, records in self._records.items()}
                self._done.append(_Done(self._stack, forms, self.streams))
                self._records = {}

    @property
    def between_stacks(self) -> bool:
        """Whether no stack is on its way."""
        return self.current is None and not self._ahead

    def is_ahead(self, path: str) -> bool:
        """Whether the layer at this path has not had its turn."""
        return path in self._ahead or any(path in stack for stack in self._waiting.values())

    def is_done(self, path: str) -> bool:
        """Whether the layer at this path belongs to a stack that has run."""
        return any(path in done.paths for done in self._done)

    def _next(self) -> str:
        """The stack that runs first, of those that have not."""
        layers = {path: self.model.get_submodule(path) for paths in self._waiting.values() for path in paths}
        if not layers:
            return ""
        with self.weights.outside(), evaluating(self.model):
            reached = first_reached(self.model, self._inputs(0), self._gone(self.which[0], 0), layers)
        return next((name for name, paths in self._waiting.items() if reached in paths), "")

    def _begin(self, others: Sequence[str]) -> None:
        self.streams = {which: ActivationStore(self.scratch, f"{which}-{len(self._done)}") for which in self.which}
        stack = [self.model.get_submodule(path) for path in self._stack]
        waiting = [self.model.get_submodule(path) for path in others]
        with evaluating(self.model):
            for which in self.which:
                self._records[which] = []
                for number in range(len(self.batches)):
                    if which != self.which[0] and not self._done:  # nothing sets them apart yet
                        recorded = self._records[self.which[0]][number]
                        self.streams[which].put(number, self.streams[self.which[0]][number])
                    else:
                        recorded = record(self.model, self._inputs(number), self._gone(which, number), stack, waiting)
                        self.streams[which].put(number, recorded.stream)
                    self._records[which].append(Recorded(recorded.calls, recorded.stream.new_empty(0), recorded.form))

    def _gone(self, which: Which, number: int) -> list[tuple[nn.Module, Callable[..., Any]]]:
        return [
            (self.model.get_submodule(path), gives(output))
            for done in self._done
            for output in [filled(done.forms[which][number], done.streams[which][number])]
            for path in done.paths
        ]

    def _inputs(self, number: int) -> dict[str, Any]:
        return self.task.inputs(self.prepared(number))

    def prepared(self, number: int) -> dict[str, Any]:
        return self.task.prepare(self.batches[number], self.device)

    # --- one layer ---

    def run(self, layer: Layer, which: Which, number: int) -> Any:
        """What the layer gives for this batch as it has come here."""
        call = self._records[which][number].calls[layer.place]
        return call.on(layer.module, self.streams[which][number])

    def advance(
        self,
        layer: Layer,
        which: Which,
        *,
        before: Callable[[int], None] | None = None,
        after: Callable[[int, torch.Tensor], None] | None = None,
    ) -> None:
        """All batches go through the layer as it is now; `before` and `after` each, others may look."""
        with torch.no_grad(), evaluating(self.model):
            for number in range(len(self.batches)):
                if before is not None:
                    before(number)
                stream = stream_in(self.run(layer, which, number))
                if after is not None:
                    after(number, stream)
                self.streams[which].put(number, stream)

    def at(self, site: Site, *, streams: bool = False) -> Iterator[SiteTokens]:
        """The tokens of this site in the pruned model, for the calibration batches: of the current layer, or of no
        layer, in a pass for which stacks that are done give what they gave."""
        inside = self.current if self.current is not None and layer_path(site.path) == self.current.path else None
        with evaluating(self.model):
            for number in range(self.calibration):
                batch = self.prepared(number)
                watch = SiteWatch(site, streams)
                with torch.no_grad(), watch.on(self.model), suppress(StopForwardError):
                    if inside is not None:
                        self.run(inside, "pruned", number)
                    else:
                        with standing_in(self._gone("pruned", number)):
                            self.model(**few_logits(self.model, self.task.inputs(batch)))
                yield watch.tokens(batch, self.task, self.first_samples[number])

    @contextmanager
    def behind(self, which: Which, number: int) -> Iterator[dict[str, Any]]:
        """When all layers have run: inputs of this batch, for which the model gives, inside the block, what comes out
        behind its last layer."""
        with self.weights.outside(), torch.no_grad(), evaluating(self.model), standing_in(self._gone(which, number)):
            yield self._inputs(number)


def stacks_of(model: PreTrainedModel, sites: Sequence[Site]) -> dict[str, list[str]]:
    """Layers in a row, by the path of the list that holds them: all in that list, with sites or not."""
    stacks: dict[str, list[str]] = {}
    for site in sites:
        path = layer_path(site.path)
        holder, _, number = path.rpartition(".")
        if site.applications > 1:
            raise UnfollowableError(
                f"its layers do not run one by one, as {site.path} runs {site.applications} times in a pass"
            )
        if number.isdigit() and holder not in stacks:
            stacks[holder] = [f"{holder}.{name}" for name, _ in model.get_submodule(holder).named_children()]
    if not stacks:
        raise UnfollowableError("it has no layers in a row")
    return stacks
