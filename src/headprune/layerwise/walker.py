"""Runs a model layer after layer: keeps the hidden states of every batch, of the dense model and of the pruned one."""

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

from headprune.hooks.layer_calls import (
    NotLayerwiseError,
    StackCalls,
    first_reached,
    hidden_of,
    insert_hidden,
    record,
    replace_forwards,
    returns,
)
from headprune.hooks.logit_blocks import few_logits
from headprune.hooks.module_paths import layer_path
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.hooks.stop_forward import StopForwardError
from headprune.layerwise.activation_store import ActivationStore
from headprune.layerwise.site_inputs import SiteRecorder, SiteTokens
from headprune.progress import tracked
from headprune.tasks import Task, batch_size
from headprune.units import Site

Which = Literal["dense", "pruned"]


class LayerWeights(Protocol):
    """Loads and unloads the weights of layers."""

    def fetch(self, path: str) -> None:
        """Load the dense weights of the layer at this path."""

    def outside(self) -> AbstractContextManager[None]:
        """Load the weights outside of layers within a block."""

    def put_back(self, path: str) -> None:
        """Unload the weights of this layer."""


class InMemory:
    """All weights are in memory all the time."""

    def fetch(self, path: str) -> None:
        pass

    @contextmanager
    def outside(self) -> Iterator[None]:
        yield

    def put_back(self, path: str) -> None:
        pass


@dataclass(frozen=True)
class Layer:
    """The current layer."""

    path: str
    module: nn.Module
    sites: tuple[Site, ...]  # by index, which need not be the order in which they run
    depth: int  # in its stack


@dataclass(frozen=True)
class _FinishedStack:
    """A stack that has run: the structure of its outputs and its last hidden states for every batch."""

    paths: tuple[str, ...]
    output_forms: Mapping[Which, Sequence[Any]]
    hidden_states: Mapping[Which, ActivationStore]


class Walker:
    """Runs all batches through one layer after the other.

    The first `calibration` batches are those of `at`. `first_samples` are the numbers of the first samples of batches
    in all the data; by default they count from 0. With empty `stacks` every site takes a pass of the whole model.
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
        self.hidden_states: dict[Which, ActivationStore] = {}
        self.current: Layer | None = None
        self._pending = dict(stacks_of(model, sites) if stacks is None else stacks)  # that have not started
        self._stack: tuple[str, ...] = ()  # the current one
        self._remaining: list[str] = []  # layers of it that have not run
        self._records: dict[Which, list[StackCalls]] = {}
        self._finished: list[_FinishedStack] = []

    # --- layer after layer ---

    def layers(self) -> Iterator[Layer]:
        """Every layer in order, with its dense weights loaded. The caller has to `advance` the hidden states before the
        next; then the layer is unloaded."""
        while self.enter():
            assert self.current is not None
            yield self.current

    def enter(self) -> bool:
        """Load the next layer, if there is one that runs."""
        self.leave()
        if not self._remaining:
            name = self._next_stack()
            if not name:
                return False  # the remaining layers do not run
            self._stack = tuple(self._pending.pop(name))
            self.weights.fetch(self._stack[0])
            with self.weights.outside():
                self._start_stack([path for stack in self._pending.values() for path in stack])
            self._remaining = list(self._stack)
        else:
            self.weights.fetch(self._remaining[0])
        depth = len(self._stack) - len(self._remaining)
        path = self._remaining.pop(0)
        sites = tuple(site for site in self.sites if layer_path(site.path) == path)
        self.current = Layer(path, self.model.get_submodule(path), sites, depth)
        return True

    def leave(self) -> None:
        """Unload the current layer, and finish its stack after the last one."""
        if self.current is not None:
            self.weights.put_back(self.current.path)
            self.current = None
            if not self._remaining:
                output_forms = {
                    which: [recorded.output_form for recorded in records] for which, records in self._records.items()
                }
                self._finished.append(_FinishedStack(self._stack, output_forms, self.hidden_states))
                self._records = {}

    @property
    def between_stacks(self) -> bool:
        """Whether no stack is running."""
        return self.current is None and not self._remaining

    def is_remaining(self, path: str) -> bool:
        """Whether the layer at this path has not run yet."""
        return path in self._remaining or any(path in stack for stack in self._pending.values())

    def is_done(self, path: str) -> bool:
        """Whether the layer at this path belongs to a stack that has run."""
        return any(path in done.paths for done in self._finished)

    def _next_stack(self) -> str:
        """The pending stack that runs first."""
        layers = {path: self.model.get_submodule(path) for paths in self._pending.values() for path in paths}
        if not layers:
            return ""
        with self.weights.outside(), evaluating(self.model):
            reached = first_reached(self.model, self._inputs(0), self._finished_forwards(self.which[0], 0), layers)
        return next((name for name, paths in self._pending.items() if reached in paths), "")

    def _start_stack(self, others: Sequence[str]) -> None:
        self.hidden_states = {
            which: ActivationStore(self.scratch, f"{which}-{len(self._finished)}") for which in self.which
        }
        stack = [self.model.get_submodule(path) for path in self._stack]
        pending = [self.model.get_submodule(path) for path in others]
        with evaluating(self.model):
            for which in self.which:
                self._records[which] = []
                for number in range(len(self.batches)):
                    if which != self.which[0] and not self._finished:  # equal before the first stack
                        recorded = self._records[self.which[0]][number]
                        self.hidden_states[which].put(number, self.hidden_states[self.which[0]][number])
                    else:
                        recorded = record(
                            self.model, self._inputs(number), self._finished_forwards(which, number), stack, pending
                        )
                        self.hidden_states[which].put(number, recorded.hidden)
                    self._records[which].append(
                        StackCalls(recorded.calls, recorded.hidden.new_empty(0), recorded.output_form)
                    )

    def _finished_forwards(self, which: Which, number: int) -> list[tuple[nn.Module, Callable[..., Any]]]:
        return [
            (self.model.get_submodule(path), returns(output))
            for done in self._finished
            for output in [insert_hidden(done.output_forms[which][number], done.hidden_states[which][number])]
            for path in done.paths
        ]

    def _inputs(self, number: int) -> dict[str, Any]:
        return self.task.inputs(self.prepared(number))

    def prepared(self, number: int) -> dict[str, Any]:
        return self.task.prepare(self.batches[number], self.device)

    # --- one layer ---

    def run(self, layer: Layer, which: Which, number: int) -> Any:
        """The output of the layer for the current hidden states of this batch."""
        call = self._records[which][number].calls[layer.depth]
        return call.on(layer.module, self.hidden_states[which][number])

    def advance(
        self,
        layer: Layer,
        which: Which,
        *,
        before: Callable[[int], None] | None = None,
        after: Callable[[int, torch.Tensor], None] | None = None,
        phase: str = "",
    ) -> None:
        """Run all batches through the layer as it is now; `before` and `after` are called for each. Progress is
        reported as this `phase`."""
        count = len(self.batches)
        numbers = tracked(range(count), f"{phase} {layer.path}", count, unit="batch") if phase else range(count)
        with torch.no_grad(), evaluating(self.model):
            for number in numbers:
                if before is not None:
                    before(number)
                hidden = hidden_of(self.run(layer, which, number))
                if after is not None:
                    after(number, hidden)
                self.hidden_states[which].put(number, hidden)

    def at(self, site: Site, *, streams: bool = False) -> Iterator[SiteTokens]:
        """The tokens of this site in the pruned model, for the calibration batches: by running the current layer, or,
        for a site outside of it, the model with the outputs of finished stacks."""
        inside = self.current if self.current is not None and layer_path(site.path) == self.current.path else None
        with evaluating(self.model):
            for number in range(self.calibration):
                batch = self.prepared(number)
                recorder = SiteRecorder(site, streams)
                with torch.no_grad(), recorder.on(self.model), suppress(StopForwardError):
                    if inside is not None:
                        self.run(inside, "pruned", number)
                    else:
                        with replace_forwards(self._finished_forwards("pruned", number)):
                            self.model(**few_logits(self.model, self.task.inputs(batch)))
                yield recorder.tokens(batch, self.task, self.first_samples[number])

    @contextmanager
    def after_layers(self, which: Which, number: int) -> Iterator[dict[str, Any]]:
        """After all layers have run: the inputs of this batch, on which the model, within the block, runs what comes
        after its last layer."""
        with (
            self.weights.outside(),
            torch.no_grad(),
            evaluating(self.model),
            replace_forwards(self._finished_forwards(which, number)),
        ):
            yield self._inputs(number)


def stacks_of(model: PreTrainedModel, sites: Sequence[Site]) -> dict[str, list[str]]:
    """Stacks of layers by the path of their module list: all layers in that list, with sites or not."""
    stacks: dict[str, list[str]] = {}
    for site in sites:
        path = layer_path(site.path)
        module_list, _, number = path.rpartition(".")
        if site.applications > 1:
            raise NotLayerwiseError(
                f"its layers do not run one by one, as {site.path} runs {site.applications} times in a pass"
            )
        if number.isdigit() and module_list not in stacks:
            stacks[module_list] = [
                f"{module_list}.{name}" for name, _ in model.get_submodule(module_list).named_children()
            ]
    if not stacks:
        raise NotLayerwiseError("it has no layers in a row")
    return stacks


def layers_of(model: PreTrainedModel, sites: Sequence[Site]) -> list[str]:
    """The paths of the layers of all stacks."""
    return [path for stack in stacks_of(model, sites).values() for path in stack]
