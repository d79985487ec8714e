"""The progress bars of Python: of a pruning run, a training and a comparison, in terminals and notebooks. Those of the
command line are in cli/progress.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from headprune.measure.trajectory import Step
from headprune.progress import Phase, describe_phase, progress_bar
from headprune.search.config import PruneConfig
from headprune.search.observers import Observer, reporting_phases

if TYPE_CHECKING:
    from headprune.search.layerwise.prune_layer import PrunedLayer


class PruningBar(Observer):
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

    def __enter__(self) -> PruningBar:
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


class StudyBar(Observer):
    """A progress bar of finished runs, with the metric of the current one; to be used as a context manager."""

    title = "Comparing"

    def __init__(self, runs: int, show: bool | None = None) -> None:
        self.bar = progress_bar(self.title, runs, unit="runs", show=show)
        self.name = ""

    def __enter__(self) -> StudyBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def study(self, jobs: Sequence[Any], finished: Collection[Any]) -> None:
        self.bar.update(len(finished))

    def run(self, name: str, job: Any = None, *, again: bool = False) -> Observer:
        self.name = name
        return self

    def step(self, step: Step, seconds: Mapping[str, float]) -> None:
        self.replayed(step)

    def replayed(self, step: Step) -> None:
        self.bar.set_postfix(run=self.name, heads=step.heads, metric=f"{step.metric:.4g}", refresh=False)
        describe_phase(self.bar, self.title, "")

    def phase(self, phase: Phase) -> None:
        describe_phase(self.bar, self.title, f"{self.name}, {phase}")

    def end(self, error: Exception | None = None) -> None:
        self.bar.update()
