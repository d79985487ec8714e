"""Observers: objects that are notified of events in a run, a training or a study, and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headprune import distributed
from headprune.measure.trajectory import Step
from headprune.progress import Phase, reporting_to

if TYPE_CHECKING:
    from headprune.search.layerwise.prune_layer import PrunedLayer

OnStep = Callable[[Step], None]


class Observer:
    """Base class of journals, progress displays and callbacks: override the methods of the events of interest.

    A pruner calls `step` and `replayed`, a layer-wise run also `layer`, a training `log`; in between, `phase` says what
    takes so long. Where there are several runs, `study` is called first, and `run` for each: the events of a run go to
    the observer that it returns.
    """

    def study(self, jobs: Sequence[Any], finished: Collection[Any]) -> None:
        """All runs of a study, and those among them that earlier processes have finished."""

    def run(self, name: str, job: Any = None, *, again: bool = False) -> Observer:
        """A run begins, or continues `again` after its process died; returns the observer of this run."""
        return self

    def step(self, step: Step, seconds: Mapping[str, float]) -> None:
        """A step was taken and measured; `seconds` says how long that took."""

    def replayed(self, step: Step) -> None:
        """A step of an earlier process was applied again."""

    def layer(self, done: int, layers: int, pruned: PrunedLayer) -> None:
        """One more layer is pruned: `done` of `layers`."""

    def log(self, entry: Mapping[str, Any]) -> None:
        """A line of a training's log: the step, how many steps there are, losses and evaluations."""

    def phase(self, phase: Phase) -> None:
        """Something that takes long, such as scoring, has begun or goes on."""

    def end(self, error: Exception | None = None) -> None:
        """The run ended, or failed with this error."""


@contextmanager
def reporting_phases(observer: Observer) -> Iterator[None]:
    """Within a block, phases are reported to this observer, in the first of several processes."""
    with reporting_to(observer.phase if distributed.is_main() else Observer().phase):
        yield


class Observers(Observer):
    """Several observers of a run as one."""

    def __init__(self, *observers: Observer) -> None:
        self.observers = observers

    def step(self, step: Step, seconds: Mapping[str, float]) -> None:
        for observer in self.observers:
            observer.step(step, seconds)

    def replayed(self, step: Step) -> None:
        for observer in self.observers:
            observer.replayed(step)

    def layer(self, done: int, layers: int, pruned: PrunedLayer) -> None:
        for observer in self.observers:
            observer.layer(done, layers, pruned)

    def log(self, entry: Mapping[str, Any]) -> None:
        for observer in self.observers:
            observer.log(entry)

    def phase(self, phase: Phase) -> None:
        for observer in self.observers:
            observer.phase(phase)

    def end(self, error: Exception | None = None) -> None:
        for observer in self.observers:
            observer.end(error)


class Journal(Observer):
    """An observer that stores the steps, with those of earlier processes."""

    steps: list[Step]


class Callback(Observer):
    """A function as an observer; it is called with replayed steps as well."""

    def __init__(self, function: OnStep) -> None:
        self.function = function

    def step(self, step: Step, seconds: Mapping[str, float]) -> None:
        self.function(step)

    def replayed(self, step: Step) -> None:
        self.function(step)
