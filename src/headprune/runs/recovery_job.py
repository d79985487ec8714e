"""The inputs of a recovery: a run's model, training data without its evaluation rows, and the dense model as
teacher."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.checkpoint.fingerprint import fingerprint
from headprune.checkpoint.paths import model_folder
from headprune.checkpoint.save_load import load
from headprune.data import Examples
from headprune.data.lazy_rows import Rows
from headprune.errors import DataError, RunError, TrainingError
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import Metric, MetricValue, choose_metric
from headprune.measure.predictions import Predictions
from headprune.measure.trajectory import finite_or_none
from headprune.run_folder import finished_record
from headprune.runs.experiment import Experiment, experiment_of
from headprune.runs.loading import find_device, load_run_inputs, read_examples
from headprune.runs.splits import split_data
from headprune.tasks import Task, batch_size, task_of
from headprune.training.config import TrainConfig
from headprune.training.dataset import row_digest
from headprune.training.fit import refuse_nothing_to_learn

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RecoveryRequest:
    """What is recovered, and on which data. `reading` has columns and the split where they differ from the run's."""

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
    def has_teacher(self) -> bool:
        return self.config.distill > 0 or self.config.hidden > 0

    @cached_property
    def source(self) -> Path:
        """The folder of the pruned model."""
        if self.point is None:
            return model_folder(self.run)
        folder = self.run / "models" / self.point
        if not (folder / "config.json").is_file():
            known = sorted(path.name for path in (self.run / "models").glob("*") if path.is_dir())
            choices = f"there are: {', '.join(known)}" if known else "it has none; leave --point out"
            raise RunError(f"{self.run} has no point {self.point!r}; {choices}.")
        return folder

    def settings(self) -> dict[str, Any]:
        """The settings that a resumed recovery must match."""
        return {
            **self.config.settings(),
            "data": self.data,
            "data_fingerprint": fingerprint(self.data),
            "point": self.point,
            "rounds": self.rounds,
            "reading": dict(self.reading),
            "model_fingerprint": fingerprint(self.source),
        }


@dataclass
class RecoveryInputs:
    """The data, the task, the teacher and the metric, which all cycles share."""

    request: RecoveryRequest
    task: Task
    training: Examples
    evaluation: Sequence[Mapping[str, Any]]
    teacher: PreTrainedModel | None
    metric: Metric
    reference: Predictions | None
    pruned: MetricValue
    notes: list[str]

    @property
    def evaluated(self) -> int:
        return sum(batch_size(batch) for batch in self.evaluation)

    def measure(self, model: PreTrainedModel) -> MetricValue:
        return self.metric.of(predictions_of(model, self.task, self.evaluation), self.reference)

    @property
    def dense(self) -> dict[str, Any]:
        """The metric of the dense model: measured, or without a teacher that in the record of the run."""
        if self.reference is not None:
            return metric_json(self.metric.of(self.reference, self.reference))
        result = self.request.record["result"]
        return {"value": result["dense"], "interval": result.get("dense_interval")}


def refuse_changes(request: RecoveryRequest) -> None:
    """Refuse a dense model or evaluation data that has changed since the run."""
    settings, experiment = request.record["settings"], request.experiment
    needs = [("data", experiment.data, "so its numbers cannot be compared")]
    if request.has_teacher or request.rounds > 1:
        needs.append(("model", experiment.model, "so it cannot be the teacher"))
    for name, path, so in needs:
        recorded, current = settings.get(f"{name}_fingerprint"), fingerprint(model_folder(path))
        fix = ", or leave it out with --no-distill" if name == "model" and request.rounds == 1 else ""
        if recorded is not None and current is None:
            raise RunError(f"{path}, the {name} of {request.run}, does not exist any more; restore it{fix}.")
        if recorded is not None and current != recorded:
            raise RunError(f"{path}, the {name} of {request.run}, has changed since, {so}; restore it{fix}.")


def load_recovery_inputs(request: RecoveryRequest) -> RecoveryInputs:
    """Load the inputs of a recovery, and raise its errors, before anything is written."""
    experiment = request.experiment
    model = load_model(request.source, experiment)
    task = task_of(model, experiment.task)
    processor = str(request.source) if experiment.processor is None or experiment.vocabulary else experiment.processor
    calibration, evaluation = split_data(experiment, read_examples(experiment, model, task, experiment.data, processor))
    evaluated = calibration if evaluation is None else evaluation
    options: dict[str, Any] = {name: value for name, value in request.reading.items() if value is not None}
    reading = experiment.with_options(data=request.data, **options)
    training, notes = _training_rows(
        request, task, read_examples(reading, model, task, request.data, processor), evaluated
    )
    refuse_nothing_to_learn(task, training, request.has_teacher)
    teacher = _load_teacher(experiment) if request.has_teacher else None
    batches = evaluated.batches(experiment.batch_size)
    predictions = predictions_of(model, task, batches)
    reference = None if teacher is None else predictions_of(teacher, task_of(teacher, task.transferable_name), batches)
    metric = choose_metric(request.record["result"]["metric"], predictions)
    if metric.name == "fidelity" and reference is None:
        raise TrainingError(
            "Fidelity compares with the dense model, which --no-distill leaves out; remove that option."
        )
    pruned = metric.of(predictions, reference)
    return RecoveryInputs(request, task, training, batches, teacher, metric, reference, pruned, notes)


def _training_rows(
    request: RecoveryRequest, task: Task, training: Examples, evaluated: Examples
) -> tuple[Examples, list[str]]:
    """The rows to train on: those that are not evaluation rows of the run."""
    recorded = request.record["settings"].get("data_fingerprint")
    same = fingerprint(request.data) == recorded if recorded is not None else request.data == request.experiment.data
    same = same and request.reading.get("split") in (None, request.experiment.split)
    left = separate_rows(task, training, evaluated, same=same)
    excluded = len(training) - len(left)
    if not excluded:
        return training, []
    if not left:
        raise DataError(
            f"All rows of {request.data} are evaluation rows of {request.run}, so none is left to train on; use other "
            "data, or prune with --evaluation-samples."
        )
    shared = f"{excluded} of the {len(training)} rows of {request.data} are evaluation rows of {request.run}"
    note = f"{shared}; they are left out, and the other {len(left)} are trained on."
    log.warning("%s", note)
    return training.select(left), [note]


def separate_rows(task: Task, training: Examples, evaluated: Examples, *, same: bool) -> list[int]:
    """Indices of the training rows that are not evaluation rows: they have other inputs, and in the `same` data other
    row numbers."""
    inputs = {row_digest(row, task.label_names) for row in evaluated.rows}
    evaluation_numbers: set[int] = set()
    numbers: Sequence[int] = range(-len(training), 0)
    if same and isinstance(training.rows, Rows) and isinstance(evaluated.rows, Rows):
        evaluation_numbers, numbers = set(evaluated.rows.numbers), training.rows.numbers
    return [
        index
        for index, (number, row) in enumerate(zip(numbers, training.rows, strict=True))
        if number not in evaluation_numbers and row_digest(row, task.label_names) not in inputs
    ]


def _load_teacher(experiment: Experiment) -> PreTrainedModel:
    """The dense model; with a shrunk vocabulary where the run shrank it."""
    if experiment.vocabulary is not None:
        return load_run_inputs(experiment).model.float()
    return load_model(model_folder(experiment.model), experiment)


def load_model(folder: Path, experiment: Experiment) -> PreTrainedModel:
    """Load in float32: updates of training are too small for half precision."""
    return load(folder, dtype=torch.float32).to(find_device(experiment.device))


def predictions_of(model: PreTrainedModel, task: Task, batches: Sequence[Mapping[str, Any]]) -> Predictions:
    return Evaluator(batches, task, cache_bytes=0)(model, ())


def metric_json(value: MetricValue) -> dict[str, Any]:
    """A metric's value and interval for JSON."""
    return {
        "value": finite_or_none(value.value),
        "interval": None if value.interval is None else list(map(finite_or_none, value.interval)),
    }
