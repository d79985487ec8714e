"""Observers: objects that are notified of events in a run, a training or a study, and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from headprune import distributed
from headprune.measure.trajectory import Step
from headprune.progress import Phase, describe_phase, progress_bar, reporting_to
from headprune.search.config import PruneConfig

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


class ProgressBar(Observer):
    """A progress bar of removed units, rounds or layers, with the metric; to be used as a context manager."""

    def __init__(self, config: PruneConfig, show: bool | None = None) -> None:
        self.config = config
        self.unit = {"rounds": "rounds", "layerwise": "layers"}.get(config.schedule, config.units[0])
        self.title = f"Pruning by {config.criterion}"
        self.bar = progress_bar(self.title, None, unit=self.unit, show=show)
        self.dense: Step | None = None

    def step(self, step: Step, seconds: Mapping[str, float]) -> None:
        self.replayed(step)

    def replayed(self, step: Step) -> None:
        if self.dense is None:
            self.dense = step
            self.bar.reset(total=self._total(step))
        if self.unit != "layers":
            self.bar.n = step.step if self.unit == "rounds" else self.dense.left - step.left
        agreement = {} if step.agreement is None else {"agreement": f"{step.agreement:.3f}"}
        metrics = {"metric": f"{step.metric:.4g}", "dense": f"{self.dense.metric:.4g}"}
        self.bar.set_postfix(**metrics, **agreement, refresh=False)
        describe_phase(self.bar, self.title, "")

    def phase(self, phase: Phase) -> None:
        describe_phase(self.bar, self.title, str(phase))

    def layer(self, done: int, layers: int, pruned: PrunedLayer) -> None:
        if self.bar.total is None:
            self.bar.reset(total=layers)
        self.bar.n = done
        self.bar.refresh()

    def _total(self, dense: Step) -> int | None:
        """How much is removed until the run ends; a rule about the metric may end it earlier. The number of layers is
        known when the first is pruned."""
        if self.unit in ("rounds", "layers"):
            return self.config.rounds if self.unit == "rounds" else None
        to_the_end = self.config.explore or self.config.knee
        return dense.left - (0 if to_the_end else self.config.stop.units_left(dense.left))

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()


class TrainingBar(Observer):
    """A progress bar of training steps, with the loss and the metric; to be used as a context manager, in which it
    shows phases too."""

    title = "Training"

    def __init__(self, show: bool | None = None) -> None:
        self.bar = progress_bar(self.title, None, unit="steps", show=show)
        self.values: dict[str, str] = {}
        self._reporting = nullcontext() if self.bar.disable else reporting_phases(self)

    def log(self, entry: Mapping[str, Any]) -> None:
        self.bar.total, self.bar.n = entry["steps"], entry["step"]
        for name, value in (("loss", entry.get("loss")), (entry["metric"], entry.get("eval_metric"))):
            if value is not None:
                self.values[name] = f"{value:.4g}"
        if "before" in entry:
            self.values[f"{entry['metric']} before"] = f"{entry['before']:.4g}"
        self.bar.set_postfix(self.values, refresh=False)
        describe_phase(self.bar, self.title, "")

    def phase(self, phase: Phase) -> None:
        describe_phase(self.bar, self.title, str(phase))

    def __enter__(self) -> TrainingBar:
        self._reporting.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._reporting.__exit__(*error)
        self.bar.close()


class Callback(Observer):
    """A function as an observer; it is called with replayed steps as well."""

    def __init__(self, function: OnStep) -> None:
        self.function = function

    def step(self, step: Step, seconds: Mapping[str, float]) -> None:
        self.function(step)

    def replayed(self, step: Step) -> None:
        self.function(step)
