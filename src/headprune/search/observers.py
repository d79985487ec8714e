"""Observers: objects that are notified of events in a run, a training or a study, and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headprune.measure.trajectory import Step
from headprune.progress import progress_bar
from headprune.search.config import PruneConfig

if TYPE_CHECKING:
    from headprune.search.layerwise.prune_layer import PrunedLayer

OnStep = Callable[[Step], None]


class Observer:
    """Base class of journals, progress displays and callbacks: override the methods of the events of interest.

    A pruner calls `step` and `replayed`, a layer-wise run also `layer`, a training `log`. Where there are several runs,
    `study` is called first, and `run` for each: the events of a run go to the observer that it returns.
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

    def end(self, error: Exception | None = None) -> None:
        """The run ended, or failed with this error."""


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

    def end(self, error: Exception | None = None) -> None:
        for observer in self.observers:
            observer.end(error)


class Journal(Observer):
    """An observer that stores the steps, with those of earlier processes."""

    steps: list[Step]


class ProgressBar(Observer):
    """A progress bar of removed units, with the metric; to be used as a context manager."""

    def __init__(self, config: PruneConfig, show: bool | None = None) -> None:
        self.config = config
        self.by_unit = config.schedule not in ("rounds", "layerwise")
        unit = config.units[0] if self.by_unit else "rounds"
        self.bar = progress_bar(f"Pruning by {config.criterion}", None, unit=unit, show=show)
        self.dense: Step | None = None

    def step(self, step: Step, seconds: Mapping[str, float]) -> None:
        self.replayed(step)

    def replayed(self, step: Step) -> None:
        if self.dense is None:
            self.dense = step
            self.bar.total = self._total(step)
        self.bar.n = self.dense.left - step.left if self.by_unit else step.step
        agreement = {} if step.agreement is None else {"agreement": f"{step.agreement:.3f}"}
        self.bar.set_postfix(metric=f"{step.metric:.4g}", dense=f"{self.dense.metric:.4g}", **agreement)

    def _total(self, dense: Step) -> int:
        """How much is removed until the run ends; a rule about the metric may end it earlier."""
        if not self.by_unit:
            return self.config.rounds
        to_the_end = self.config.explore or self.config.knee
        return dense.left - (0 if to_the_end else self.config.stop.units_left(dense.left))

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()


class Callback(Observer):
    """A function as an observer; it is called with replayed steps as well."""

    def __init__(self, function: OnStep) -> None:
        self.function = function

    def step(self, step: Step, seconds: Mapping[str, float]) -> None:
        self.function(step)

    def replayed(self, step: Step) -> None:
        self.function(step)
