"""`evaluate`: measures a model on data that was not used to calibrate, train or select it, and the dense model on the
same samples."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from headprune.checkpoint.fingerprint import fingerprint
from headprune.checkpoint.paths import enclosing_run, model_in, refuse_missing_model
from headprune.checkpoint.save_load import load
from headprune.data import Examples
from headprune.data.examples import own_processor
from headprune.data.locations import refuse_missing_data
from headprune.errors import DataError, HeadpruneError, RunError, UnsupportedModelError
from headprune.hooks.model_lock import exclusively_if_loaded
from headprune.measure.costs import total_parameters
from headprune.measure.evaluation import EvaluateResult, evaluate_predictions
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import METRICS, MetricFunction
from headprune.measure.predictions import Predictions
from headprune.progress import phase_bar
from headprune.run_folder import finished_record
from headprune.run_folder.folder import read_record
from headprune.run_folder.record_forms import TRAINED
from headprune.run_folder.recovery import FOLDER, RECORD
from headprune.runs.experiment import experiment_of
from headprune.runs.loading import dtype_named, find_device, load_dense, read_examples
from headprune.runs.recovery_job import separate_rows
from headprune.runs.splits import calibration_count, split_data, validation_examples
from headprune.search.config import Experiment
from headprune.tasks import Task, task_of
from headprune.tasks.checks import checked_batches

log = logging.getLogger(__name__)
Batches = Iterable[Mapping[str, Any]]


@exclusively_if_loaded
def evaluate(
    model: PreTrainedModel | str | Path,
    data: str | Path | Examples | Batches,
    *,
    dense: PreTrainedModel | str | Path | None = None,
    metric: str | MetricFunction | None = None,
    samples: int | None = None,
    task: str | None = None,
    text_column: str | None = None,
    pair_column: str | None = None,
    label_column: str | None = None,
    context_column: str | None = None,
    choices_column: str | None = None,
    split: str | None = None,
    processor: str | None = None,
    max_length: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    dtype: str | None = None,
    device: str | None = None,
    progress: bool | None = None,
) -> EvaluateResult:
    """The metric of a model with its 95 % interval, that of the dense model, and whether they differ.

    `model` is a model, the folder of one, a name on the hub, or a run, of which the pruned and the dense model and the
    data settings are used. `data` is what the command line takes as --data, the result of `load_examples`, or batches.
    Rows of a file that calibrated, trained or selected the model of a run are left out, and a file without other rows
    is refused: on them a model looks better than it is. `samples` draws this many by the seed.

    A model that is loaded here computes in `dtype` on `device`, by default as the run did, else in float32; a model
    object stays as it is, where it is.
    """
    if not isinstance(model, (PreTrainedModel, str, Path)):
        raise UnsupportedModelError(
            f"evaluate takes a model of transformers, or a folder, a run or a hub name, not a {type(model).__name__}; "
            "call merge_and_unload() on an adapter model first."
        )
    settings = {
        "task": task,
        "text_column": text_column,
        "pair_column": pair_column,
        "label_column": label_column,
        "context_column": context_column,
        "choices_column": choices_column,
        "split": split,
        "processor": processor,
        "max_length": max_length,
        "batch_size": batch_size,
        "seed": seed,
        "dtype": dtype,
        "device": device,
    }
    source = str(data) if isinstance(data, (str, Path)) else None
    evaluated_model = _describe_model(
        model, source, {name: value for name, value in settings.items() if value is not None}
    )
    if isinstance(dense, (str, Path)):
        refuse_missing_model(model_in(dense))
    elif dense is None and evaluated_model.run is not None:
        _refuse_changed_dense(evaluated_model)
    first = _first_pass(model, evaluated_model, data, samples, progress)
    second = _dense_pass(dense, evaluated_model, first, progress)
    if metric is None and evaluated_model.record is not None:
        metric = _run_metric(evaluated_model.record, first.model_predictions.predictions, second is not None)
    return evaluate_predictions(
        evaluated_model.name,
        first.model_predictions.predictions,
        first.model_predictions.parameters,
        metric=metric,
        dense=None if second is None else (second.name, second.predictions, second.parameters),
        data=source,
        notes=tuple(first.notes),
    )


class _ModelPredictions(NamedTuple):
    """The results of a model, which is not kept in memory."""

    name: str
    predictions: Predictions
    parameters: int
    tokens: int | None  # of its vocabulary


class _FirstPass(NamedTuple):
    """The results of the model, and what is needed to run the dense one on the same batches."""

    model_predictions: _ModelPredictions
    batches: Sequence[Mapping[str, Any]]
    task: str
    notes: list[str]


class _UsedRows(NamedTuple):
    """Rows that calibrated, trained or selected the model of a run, and their source."""

    source: str
    rows: Examples
    same: bool  # whether this is the data to evaluate on


@dataclass(frozen=True)
class _EvaluatedModel:
    """What is evaluated: a model by its folder, its run, and the settings for reading data."""

    name: str
    folder: str | None  # to load the model from; None for one that is loaded already
    experiment: Experiment  # settings for data, precision and device
    run: Path | None = None
    record: dict[str, Any] | None = None

    @property
    def processor(self) -> str | None:
        """The processor of the data: the one of the settings, or that of the model itself."""
        experiment = self.experiment
        return experiment.processor if experiment.processor and not experiment.vocabulary else self.folder

    @property
    def pruning(self) -> Experiment:
        """The experiment of the run."""
        assert self.record is not None
        return experiment_of(self.record)


def _describe_model(
    model: PreTrainedModel | str | Path, source: str | None, settings: Mapping[str, Any]
) -> _EvaluatedModel:
    if source is not None:
        refuse_missing_data(source)
    if isinstance(model, PreTrainedModel):
        name = model.name_or_path or type(model).__name__
        return _EvaluatedModel(name, None, Experiment(model=model.name_or_path, data=source or "", **settings))
    folder, run = model_in(model), enclosing_run(model)
    refuse_missing_model(folder)
    if run is None:
        return _EvaluatedModel(str(model), folder, Experiment(model=folder, data=source or "", **settings))
    record = finished_record(run)
    experiment = experiment_of(record).with_options(data=source or "", calibration=None, **settings)
    return _EvaluatedModel(str(model), folder, experiment, run, record)


def _refuse_changed_dense(evaluated_model: _EvaluatedModel) -> None:
    """Refuse a dense model that has changed since the run started from it."""
    assert evaluated_model.record is not None
    recorded, dense_path = evaluated_model.record["settings"].get("model_fingerprint"), evaluated_model.pruning.model
    if recorded is not None and Path(dense_path).is_dir() and fingerprint(model_in(dense_path)) != recorded:
        raise RunError(
            f"{dense_path}, the model that {evaluated_model.run} started from, has changed since; restore it, or name "
            "another one with --dense."
        )


def _first_pass(
    model: PreTrainedModel | str | Path,
    evaluated_model: _EvaluatedModel,
    data: Any,
    samples: int | None,
    progress: bool | None,
) -> _FirstPass:
    if not isinstance(model, PreTrainedModel):
        assert evaluated_model.folder is not None
        model = _load(evaluated_model.folder, evaluated_model.experiment)
    task = task_of(model, evaluated_model.experiment.task)
    batches, notes = _batches(evaluated_model, model, task, data, samples)
    model_predictions = _measure(evaluated_model.name, model, task, batches, "Evaluating the model", progress)
    return _FirstPass(model_predictions, batches, task.transferable_name, notes)


def _dense_pass(
    dense: PreTrainedModel | str | Path | None,
    evaluated_model: _EvaluatedModel,
    first: _FirstPass,
    progress: bool | None,
) -> _ModelPredictions | None:
    """Run the dense model on the same batches; it is loaded now, so that both are not in memory at once."""
    if isinstance(dense, PreTrainedModel):
        name, model = dense.name_or_path or type(dense).__name__, dense
    elif dense is not None:
        name, model = str(dense), _load(model_in(dense), evaluated_model.experiment)
    elif evaluated_model.run is None:
        return None
    else:
        name = evaluated_model.pruning.model
        try:
            model = load_dense(evaluated_model.pruning, dtype_named(evaluated_model.experiment.dtype))
        except HeadpruneError as error:
            log.warning("The dense model cannot be loaded, so only the pruned one is evaluated: %s", error)
            return None
        model = model.to(find_device(evaluated_model.experiment.device))
    if _tokens(model) != first.model_predictions.tokens:
        raise DataError(
            f"The models have vocabularies of {first.model_predictions.tokens} and {_tokens(model)} tokens, so they "
            "cannot take the same batches; name the dense model that this one was pruned from."
        )
    return _measure(name, model, task_of(model, first.task), first.batches, "Evaluating the dense model", progress)


def _run_metric(record: Mapping[str, Any], predictions: Predictions, compared: bool) -> str | None:
    """The metric of the run, where it can be computed from this data and these models."""
    name: str = record["result"]["metric"]
    possible = compared if name == "fidelity" else predictions.labels is not None and name in METRICS
    return name if possible else None


def _load(folder: str, experiment: Experiment) -> PreTrainedModel:
    return load(folder, dtype=dtype_named(experiment.dtype)).to(find_device(experiment.device))


def _batches(
    evaluated_model: _EvaluatedModel, model: PreTrainedModel, task: Task, data: Any, samples: int | None
) -> tuple[Sequence[Mapping[str, Any]], list[str]]:
    """The batches to evaluate on, and notes on rows that were left out."""
    experiment = evaluated_model.experiment
    notes: list[str] = []
    if isinstance(data, (str, Path)):
        examples = read_examples(experiment, model, task, str(data), evaluated_model.processor or own_processor(model))
        examples, notes = _unused_examples(evaluated_model, model, task, examples)
    elif isinstance(data, Examples):
        examples = data
    else:
        if samples is not None:
            raise DataError("samples= draws from a file or from examples, not from batches; leave it out.")
        batches = list(checked_batches(data, model))
        if not batches:
            raise DataError("There are no batches to evaluate on; give at least one.")
        return batches, []
    return examples.sample(samples, experiment.seed).batches(experiment.batch_size), notes


def _unused_examples(
    evaluated_model: _EvaluatedModel, model: PreTrainedModel, task: Task, examples: Examples
) -> tuple[Examples, list[str]]:
    """The examples that did not calibrate, train or select the model."""
    if evaluated_model.record is None:
        return examples, []
    left, data = examples, evaluated_model.experiment.data
    notes: list[str] = []
    for used in _used_rows(evaluated_model, model, task, notes):
        left = left.select(separate_rows(task, left, used.rows, same=used.same)) if len(left) else left
    seen = f"calibrated, trained or selected the model of {evaluated_model.run}"
    if not len(left):
        raise DataError(
            f"All {len(examples)} rows of {data} {seen}, so they cannot evaluate it; use data that it has not seen."
        )
    if len(left) < len(examples):
        notes.append(
            f"{len(examples) - len(left)} of the {len(examples)} rows of {data} {seen}; they are left out, and the "
            f"other {len(left)} evaluate it."
        )
    for note in notes:
        log.warning("%s", note)
    return left, notes


def _used_rows(
    evaluated_model: _EvaluatedModel, model: PreTrainedModel, task: Task, notes: list[str]
) -> Iterator[_UsedRows]:
    """The rows that a run used, by source; sources that cannot be read any more are added to the notes."""
    assert evaluated_model.record is not None
    settings, pruning = evaluated_model.record["settings"], evaluated_model.pruning
    evaluated, current = evaluated_model.experiment, fingerprint(evaluated_model.experiment.data)

    def read_source(
        read_settings: Experiment, recorded: str | None, *, labels: bool = True
    ) -> tuple[Examples, bool] | None:
        fingerprint_now = fingerprint(read_settings.data)
        if recorded is not None and fingerprint_now != recorded:
            change = "does not exist any more" if fingerprint_now is None else "has changed since"
            notes.append(
                f"{read_settings.data}, which {evaluated_model.run} used, {change}, so rows of "
                f"{evaluated.data} may be among those that it used."
            )
            return None
        same = current == recorded if recorded is not None else read_settings.data == evaluated.data
        processor, same_split = evaluated_model.processor, read_settings.split == evaluated.split
        rows = read_examples(read_settings, model, task, read_settings.data, processor, labels=labels)
        return rows, same and same_split

    if (source := read_source(pruning, settings.get("data_fingerprint"))) is not None:
        for rows in (*split_data(pruning, source[0]), validation_examples(pruning, source[0])):
            if rows is not None and len(rows):
                yield _UsedRows(pruning.data, rows, source[1])
    if pruning.calibration is not None and not settings.get("training"):
        read_settings = pruning.with_options(data=pruning.calibration, calibration=None)
        if (source := read_source(read_settings, settings.get("calibration_fingerprint"), labels=False)) is not None:
            count = calibration_count(pruning, len(source[0]))
            yield _UsedRows(read_settings.data, source[0].sample(count, pruning.seed), source[1])
    for training in filter(None, (settings.get("training"), _recovery(evaluated_model))):
        options = {name: value for name, value in (training.get("reading") or {}).items() if value is not None}
        read_settings = pruning.with_options(data=training["data"], calibration=None, **options)
        if (source := read_source(read_settings, training.get("data_fingerprint"))) is not None:
            yield _UsedRows(read_settings.data, *source)


def _recovery(evaluated_model: _EvaluatedModel) -> dict[str, Any] | None:
    """The settings of the recovery of a model, where it is a recovered model of a run."""
    assert evaluated_model.run is not None
    folder = evaluated_model.run.absolute() / FOLDER
    if evaluated_model.folder is None or folder not in Path(evaluated_model.folder).absolute().parents:
        return None
    if not (folder / RECORD).is_file():
        raise RunError(f"{folder / RECORD} is missing; recover the model again with --overwrite.")
    settings: dict[str, Any] = read_record(folder / RECORD, {"settings": TRAINED})["settings"]
    return settings


def _measure(
    name: str,
    model: PreTrainedModel,
    task: Task,
    batches: Sequence[Mapping[str, Any]],
    description: str,
    progress: bool | None,
) -> _ModelPredictions:
    with phase_bar(description, progress):
        predictions = Evaluator(batches, task, cache_bytes=0)(model, ())
    return _ModelPredictions(name, predictions, total_parameters(model), _tokens(model))


def _tokens(model: PreTrainedModel) -> int | None:
    return getattr(model.config.get_text_config(), "vocab_size", None)
