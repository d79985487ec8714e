"""What a recovery works on: a run's model, data apart from its evaluation rows, and the dense model as teacher."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.data import Examples
from headprune.data.lazy import Rows
from headprune.errors import DataError, RunError, TrainingError
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import Measured, Metric, choose_metric
from headprune.measure.quality import Quality
from headprune.measure.trajectory import plain
from headprune.recovery.config import TrainConfig
from headprune.recovery.rows import row_digest
from headprune.recovery.trainer import refuse_nothing_to_learn
from headprune.runs.experiment import Experiment, drawn, experiment_of, fingerprint
from headprune.runs.subject import find_device, load_subject, read_examples
from headprune.store.checkpoint import load
from headprune.store.places import model_folder
from headprune.store.rundir import finished_record
from headprune.tasks import Task, batch_size, task_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be recovered, and on what. `reading` are columns and the split where they differ from the run's."""

    run: Path
    data: str
    config: TrainConfig = field(default_factory=TrainConfig)
    point: str | None = None
    rounds: int = 1
    reading: Mapping[str, str | None] = field(default_factory=dict)

    @cached_property
    def record(self) -> dict[str, Any]:
        return finished_record(self.run)

    @cached_property
    def experiment(self) -> Experiment:
        return experiment_of(self.record)

    @property
    def teaches(self) -> bool:
        return self.config.distill > 0 or self.config.hidden > 0

    @cached_property
    def source(self) -> Path:
        """The folder of the pruned model."""
        if self.point is None:
            return model_folder(self.run)
        folder = self.run / "models" / self.point
        if not (folder / "config.json").is_file():
            known = sorted(path.name for path in (self.run / "models").glob("*") if path.is_dir())
            there = f"there are: {', '.join(known)}" if known else "it has none; leave --point out"
            raise RunError(f"{self.run} has no point {self.point!r}; {there}.")
        return folder

    def settings(self) -> dict[str, Any]:
        """What a resumed recovery must agree with."""
        return {
            **self.config.settings(),
            "data": self.data,
            "data_fingerprint": fingerprint(self.data),
            "point": self.point,
            "rounds": self.rounds,
            "reading": dict(self.reading),
            "model_fingerprint": fingerprint(str(self.source)),
        }


@dataclass
class Setting:
    """Everything that rounds have in common: data, task, teacher, and how models are measured."""

    request: Request
    task: Task
    training: Examples
    evaluation: Sequence[Mapping[str, Any]]
    teacher: PreTrainedModel | None
    metric: Metric
    reference: Quality | None
    pruned: Measured
    notes: list[str]

    @property
    def evaluated(self) -> int:
        return sum(batch_size(batch) for batch in self.evaluation)

    def measure(self, model: PreTrainedModel) -> Measured:
        return self.metric.of(quality_of(model, self.task, self.evaluation), self.reference)

    @property
    def dense(self) -> dict[str, Any]:
        """Measured where the dense model is there, as the run wrote it down where it is not."""
        if self.reference is not None:
            return plain_measured(self.metric.of(self.reference, self.reference))
        result = self.request.record["result"]
        return {"value": result["dense"], "interval": result.get("dense_interval")}


def refuse_changes(request: Request) -> None:
    """Refuse a dense model or evaluation data that is not what the run was made with."""
    known, experiment = request.record["settings"], request.experiment
    needs = [("data", experiment.data, "so its numbers do not compare")]
    if request.teaches or request.rounds > 1:
        needs.append(("model", experiment.model, "so it cannot teach"))
    for name, place, so in needs:
        then, now = known.get(f"{name}_fingerprint"), fingerprint(str(model_folder(place)))
        fix = ", or leave it out with --no-distill" if name == "model" and request.rounds == 1 else ""
        if then is not None and now is None:
            raise RunError(
                f"{place}, the {name} that {request.run} was made with, is not there any more; put it back{fix}."
            )
        if then is not None and now != then:
            raise RunError(
                f"{place}, the {name} that {request.run} was made with, has changed since, {so}; put the old one "
                f"back{fix}."
            )


def load_setting(request: Request) -> Setting:
    """Load all that a recovery needs, and refuse what it could not use, before anything is written."""
    experiment = request.experiment
    model = load_model(request.source, experiment)
    task = task_of(model, experiment.task)
    place = str(request.source) if experiment.processor is None or experiment.vocabulary else experiment.processor
    calibration, evaluation = drawn(experiment, read_examples(experiment, model, task, experiment.data, place))
    evaluated = calibration if evaluation is None else evaluation
    asked: dict[str, Any] = {name: value for name, value in request.reading.items() if value is not None}
    reading = experiment.with_options(data=request.data, **asked)
    training, notes = _apart(request, task, read_examples(reading, model, task, request.data, place), evaluated)
    refuse_nothing_to_learn(task, training, request.teaches)
    teacher = _teacher(experiment) if request.teaches else None
    batches = evaluated.batches(experiment.batch_size)
    found = quality_of(model, task, batches)
    reference = None if teacher is None else quality_of(teacher, task_of(teacher, task.same), batches)
    metric = choose_metric(request.record["result"]["metric"], found)
    if metric.name == "fidelity" and reference is None:
        raise TrainingError("Fidelity is to the dense model, so it cannot be measured without; leave out --no-distill.")
    return Setting(request, task, training, batches, teacher, metric, reference, metric.of(found, reference), notes)


def _apart(request: Request, task: Task, training: Examples, evaluated: Examples) -> tuple[Examples, list[str]]:
    """The rows to train on: those that do not evaluate the run."""
    known = request.record["settings"].get("data_fingerprint")
    same = fingerprint(request.data) == known if known is not None else request.data == request.experiment.data
    same = same and request.reading.get("split") in (None, request.experiment.split)
    left = places_apart(task, training, evaluated, same=same)
    out = len(training) - len(left)
    if not out:
        return training, []
    if not left:
        raise DataError(
            f"All rows of {request.data} evaluate {request.run}, and none is left to train on; give other data, or "
            "prune with --evaluation-samples."
        )
    shared = f"{out} of the {len(training)} rows of {request.data} evaluate {request.run}"
    note = f"{shared}; they are left out, and the other {len(left)} are trained on."
    log.warning("%s", note)
    return training.select(left), [note]


def places_apart(task: Task, training: Examples, evaluated: Examples, *, same: bool) -> list[int]:
    """Places of the rows to train on that do not evaluate: they have other inputs, and in the `same` data other
    numbers."""
    inputs = {row_digest(row, task.label_names) for row in evaluated.rows}
    held: set[int] = set()
    numbers: Sequence[int] = range(-len(training), 0)
    if same and isinstance(training.rows, Rows) and isinstance(evaluated.rows, Rows):
        held, numbers = set(evaluated.rows.numbers), training.rows.numbers
    return [
        place
        for place, (number, row) in enumerate(zip(numbers, training.rows, strict=True))
        if number not in held and row_digest(row, task.label_names) not in inputs
    ]


def _teacher(experiment: Experiment) -> PreTrainedModel:
    """The dense model; where the run made the vocabulary smaller, with the tokens that it kept."""
    if experiment.vocabulary is not None:
        return load_subject(experiment).model.float()
    return load_model(model_folder(experiment.model), experiment)


def load_model(place: Path, experiment: Experiment) -> PreTrainedModel:
    """In full precision: what training adds is lost in half of it."""
    return load(place, dtype=torch.float32).to(find_device(experiment.device))


def quality_of(model: PreTrainedModel, task: Task, batches: Sequence[Mapping[str, Any]]) -> Quality:
    return Evaluator(batches, task, cache_bytes=0)(model, ())


def plain_measured(found: Measured) -> dict[str, Any]:
    """A metric's value and interval as JSON can hold them."""
    return {
        "value": plain(found.value),
        "interval": None if found.interval is None else list(map(plain, found.interval)),
    }
