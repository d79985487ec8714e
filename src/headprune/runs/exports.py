"""Exports the model of a run: checks it on the evaluation samples of the run, times it and the dense model, and adds
the export to the run, its report and its model card."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.checkpoint.atomic_files import path_exists, write_text
from headprune.checkpoint.fingerprint import fingerprint
from headprune.checkpoint.paths import enclosing_run, local_folder, model_in, refuse_missing_model
from headprune.checkpoint.save_load import load
from headprune.data import Examples
from headprune.errors import ExportError, HeadpruneError, RunError
from headprune.exports.export_model import dummy_batches, export, files_of_export, runtime_of
from headprune.reports.card import CARD, RECOVERED, run_card
from headprune.reports.exports import exports_of
from headprune.run_folder import finished_record, held_lock, write_card
from headprune.run_folder.exports import add_export
from headprune.runs.experiment import Experiment, experiment_of, publish_run
from headprune.runs.loading import load_dense, read_examples
from headprune.runs.splits import split_data
from headprune.tasks import Task, task_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What is exported, and where to. `reading` has settings for data that differ from the run's."""

    source: str  # a run, one of its models, another model's folder, or a name on the hub
    to: str
    out: Path | None = None
    quantize: str | None = None
    data: str | None = None
    dense: str | None = None
    samples: int | None = None
    metric: str | None = None
    max_drop: float | None = None
    threads: int = 1
    reading: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def run(self) -> Path | None:
        """The run that the model belongs to, if any."""
        return enclosing_run(self.source)

    @cached_property
    def folder(self) -> str:
        """The folder of the model."""
        return model_in(self.source)

    @cached_property
    def of(self) -> str:
        """The model's folder inside its run."""
        assert self.run is not None
        return str(Path(self.folder).absolute().relative_to(self.run.absolute()))

    @cached_property
    def target(self) -> Path:
        """Where the export is written: `out`, or a folder of the run."""
        if self.out is not None:
            return self.out
        if self.run is None:
            raise ExportError(f"{self.source} belongs to no run; name a folder for the export with --out.")
        other = {"model": "", RECOVERED: "recovered"}.get(self.of, self.of.removeprefix("models/").replace("/", "-"))
        return self.run / "exports" / "-".join(filter(None, [other, self.to, self.quantize]))

    @cached_property
    def record(self) -> dict[str, Any]:
        assert self.run is not None
        return finished_record(self.run)

    @cached_property
    def experiment(self) -> Experiment:
        """The settings for data: the run's, changed by `reading`."""
        options = {name: value for name, value in self.reading.items() if value is not None}
        if self.run is None:
            return Experiment(model=self.folder, data=self.data or "", **options)
        if self.data is None:
            return experiment_of(self.record).with_options(**options)
        return experiment_of(self.record).with_options(data=self.data, calibration=None, **options)


def check_request(request: ExportRequest, *, overwrite: bool) -> None:
    """Raise the errors that need nothing to be loaded."""
    runtime_of(request.to, request.quantize)
    if request.run is not None:
        request.record  # noqa: B018  # raises for an unfinished run
        exports_of(request.run)  # raises where the list of exports is damaged
    refuse_missing_model(request.folder)
    if request.dense is not None:
        refuse_missing_model(request.dense)
    if request.quantize is not None and request.run is None and request.data is None:
        raise ExportError("A quantised model is checked by its metric, which needs data; name some with --data.")
    if path_exists(request.target, ExportError) and request.target.is_dir() and any(request.target.iterdir()):
        files_of_export(request.target)  # raises where it is something else
        if not overwrite:
            raise ExportError(f"{request.target} has an export already; use --overwrite, or choose another folder.")


def run_export(request: ExportRequest, *, overwrite: bool = False) -> dict[str, Any]:
    """Export, and add the export to the run of the model, if it has one; returns the record."""
    check_request(request, overwrite=overwrite)
    model = load(request.folder, dtype=torch.float32)
    task = task_of(model, request.experiment.task)
    record = export(
        model,
        request.target,
        _batches(request, model, task),
        to=request.to,
        quantize=request.quantize,
        dense=_dense(request),
        task=task,
        metric=request.metric or _metric(request),
        max_drop=request.max_drop,
        threads=request.threads,
        tokenizer=local_folder(request.folder),
    )
    if request.run is not None:
        _add_to_run(request, request.run, record)
    return record


def _batches(request: ExportRequest, model: PreTrainedModel, task: Task) -> list[dict[str, Any]]:
    """The evaluation samples of the run, or those of other data."""
    experiment = request.experiment
    if not experiment.data:
        return dummy_batches(model)
    if request.run is not None and request.data is None:
        _refuse_changed(request)
    uses_model_folder = experiment.processor is None or experiment.vocabulary
    examples = read_examples(
        experiment, model, task, experiment.data, request.folder if uses_model_folder else experiment.processor
    )
    if request.run is not None and request.data is None:
        calibration, evaluation = split_data(experiment, examples)
        examples = calibration if evaluation is None else evaluation
    chosen: Examples = examples.sample(request.samples, experiment.seed)
    return [dict(batch) for batch in chosen.batches(experiment.batch_size)]


def _refuse_changed(request: ExportRequest) -> None:
    recorded, current = request.record["settings"].get("data_fingerprint"), fingerprint(request.experiment.data)
    if recorded is not None and recorded != current:
        change = "does not exist any more" if current is None else "has changed since"
        raise RunError(
            f"{request.experiment.data}, the data of {request.run}, {change}; restore it, or name other data with "
            "--data."
        )


def _metric(request: ExportRequest) -> str | None:
    """The metric of the run, but for fidelity, which compares with the dense model."""
    name = None if request.run is None else request.record["result"]["metric"]
    return None if name == "fidelity" or request.data is not None else name


def _dense(request: ExportRequest) -> PreTrainedModel | None:
    """The dense model: the one in the request, or that of the run if it can be loaded."""
    if request.dense is not None:
        return load(request.dense, dtype=torch.float32)
    if request.run is None:
        return None
    try:
        return load_dense(experiment_of(request.record))
    except HeadpruneError as error:
        log.warning("The dense model cannot be loaded, so the export is not compared with it: %s", error)
        return None


def _add_to_run(request: ExportRequest, run: Path, record: Mapping[str, Any]) -> None:
    """Add the export to the run, its model card and its report."""
    of = request.of
    entry = {
        **record,
        "of": of,
        "out": str(request.target),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    with held_lock(run):
        card = run / of / CARD
        is_unedited = card.is_file() and card.read_text() == run_card(run, of)
        add_export(run, entry)
        if is_unedited:
            text = run_card(run, of)
            if of == "model":
                write_card(run, text)
            else:
                write_text(card, text)
        elif card.is_file():
            log.warning("%s was edited, so the export is not added to it.", card)
        (run / "report.html").unlink(missing_ok=True)
        publish_run(run, request.record)
