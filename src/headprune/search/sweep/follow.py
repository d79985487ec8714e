"""Following a model through its layers: where every batch has got to, in the dense model and in the pruned one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.errors import UnsupportedModelError
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
from headprune.hooks.outputs import evaluating
from headprune.hooks.paths import layer_path
from headprune.repair.passes import FarEnoughError, Look, Seen
from headprune.search.sweep.streams import Kept
from headprune.tasks import Task, batch_size
from headprune.units import Site

Which = Literal["dense", "pruned"]
WHICH: tuple[Which, ...] = ("dense", "pruned")


class Shelf(Protocol):
    """Where layers are while it is not their turn."""

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
    streams: Mapping[Which, Kept]


class Follower:
    """All batches, followed through one layer after the other. `calibration` comes first among the batches; the others
    only pass through."""

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[Site],
        batches: Sequence[Mapping[str, Any]],
        task: Task,
        shelf: Shelf,
        *,
        calibration: int | None = None,
        device: torch.device | None = None,
        scratch: Path | None = None,
        which: Sequence[Which] = WHICH,
    ) -> None:
        self.model, self.sites, self.batches, self.task, self.shelf = model, sites, batches, task, shelf
        self.calibration = len(batches) if calibration is None else calibration
        self.device = device or torch.device("cpu")
        self.which = tuple(which)
        self.scratch = scratch
        self.stacks = stacks_of(model, sites)
        self.streams: dict[Which, Kept] = {}
        self._records: dict[Which, list[Recorded]] = {}
        self._done: list[_Done] = []

    # --- layer after layer ---

    def layers(self) -> Iterator[Layer]:
        """Every layer in its turn, with its dense weights there. Whoever takes it has to `advance` both streams before
        the next; it is put back then."""
        waiting = dict(self.stacks)
        while waiting:
            name = self._next(waiting)
            if not name:
                return  # what is left does not run
            paths = waiting.pop(name)
            self.shelf.fetch(paths[0])
            with self.shelf.outside():
                self._begin(paths, [path for stack in waiting.values() for path in stack])
            for place, path in enumerate(paths):
                if place:
                    self.shelf.fetch(path)
                own = tuple(site for site in self.sites if layer_path(site.path) == path)
                yield Layer(path, self.model.get_submodule(path), own, place)
                self.shelf.put_back(path)
            self._end(paths)

    def _next(self, waiting: Mapping[str, Sequence[str]]) -> str:
        """The stack that runs first, of those that have not."""
        layers = {path: self.model.get_submodule(path) for paths in waiting.values() for path in paths}
        with self.shelf.outside(), evaluating(self.model):
            reached = first_reached(self.model, self._inputs(0), self._gone(self.which[0], 0), layers)
        return next((name for name, paths in waiting.items() if reached in paths), "")

    def _begin(self, paths: Sequence[str], others: Sequence[str]) -> None:
        self.streams = {which: Kept(self.scratch, f"{which}-{len(self._done)}") for which in self.which}
        stack = [self.model.get_submodule(path) for path in paths]
        waiting = [self.model.get_submodule(path) for path in others]
        with evaluating(self.model):
            for which in self.which:
                self._records[which] = []
                for number in range(len(self.batches)):
                    inputs, gone = self._inputs(number), self._gone(which, number)
                    if which != self.which[0] and not self._done:  # nothing sets them apart yet
                        found = self._records[self.which[0]][number]
                        self.streams[which].put(number, self.streams[self.which[0]][number])
                    else:
                        found = record(self.model, inputs, gone, stack, waiting)
                        self.streams[which].put(number, found.stream)
                    self._records[which].append(Recorded(found.calls, found.stream.new_empty(0), found.form))

    def _end(self, paths: Sequence[str]) -> None:
        forms = {which: [own.form for own in records] for which, records in self._records.items()}
        self._done.append(_Done(tuple(paths), forms, self.streams))
        self._records = {}

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

    @contextmanager
    def behind(self, which: Which, number: int) -> Iterator[dict[str, Any]]:
        """When all layers have run: inputs of this batch, for which the model gives, inside the block, what comes out
        behind its last layer."""
        with self.shelf.outside(), torch.no_grad(), evaluating(self.model), standing_in(self._gone(which, number)):
            yield self._inputs(number)


class LayerPasses:
    """Passes of the calibration batches through one layer, as far as one of its sites."""

    def __init__(self, follower: Follower, layer: Layer) -> None:
        self.follower, self.layer = follower, layer

    def at(self, site: Site, *, streams: bool = False) -> Iterator[Seen]:
        """What passes at this site for real tokens, in the pruned model, batch after batch."""
        first = 0
        follower = self.follower
        for number in range(follower.calibration):
            batch = follower.prepared(number)
            look = Look(site, streams)
            with (
                torch.no_grad(),
                evaluating(follower.model),
                look.on(follower.model),
                suppress(FarEnoughError),
            ):
                follower.run(self.layer, "pruned", number)
            yield look.seen(batch, follower.task, first)
            first += batch_size(batch)


def stacks_of(model: PreTrainedModel, sites: Sequence[Site]) -> dict[str, list[str]]:
    """Layers in a row, by the path of the list that holds them: all in that list, with sites or not."""
    stacks: dict[str, list[str]] = {}
    for site in sites:
        path = layer_path(site.path)
        holder, _, number = path.rpartition(".")
        if site.applications > 1:
            raise UnsupportedModelError(
                f"A sweep goes through layers one by one, and {site.path} runs {site.applications} times in a pass; "
                "use --schedule rounds."
            )
        if number.isdigit() and holder not in stacks:
            stacks[holder] = [f"{holder}.{name}" for name, _ in model.get_submodule(holder).named_children()]
    if not stacks:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no layers that could be gone through one by one; use --schedule rounds."
        )
    return stacks


@contextmanager
def followed(model: nn.Module) -> Iterator[None]:
    """A model that cannot be followed is refused in a sentence."""
    try:
        yield
    except UnfollowableError as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be gone through layer by layer: {error}; use --schedule rounds."
        ) from None
