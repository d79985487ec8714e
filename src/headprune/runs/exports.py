"""Exporting the model of a run: checked on the run's own evaluation samples, timed beside its dense model, and written
down in the run, its report and its model card."""

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

from headprune.data import Examples
from headprune.errors import ExportError, HeadpruneError, RunError
from headprune.report.exports import exports_of, with_exports, write_exports
from headprune.runs.experiment import Experiment, drawn, experiment_of, fingerprint, publish_run
from headprune.runs.subject import load_subject, read_examples
from headprune.runtimes.exporting import RECORD, export, runtime_of
from headprune.runtimes.madeup import made_up_batches
from headprune.store.checkpoint import load
from headprune.store.files import is_there, write_text
from headprune.store.places import local_folder, model_folder, refuse_missing_model
from headprune.store.rundir import finished_record
from headprune.tasks import Task, task_of

log = logging.getLogger(__name__)

FOLDERS = 3  # a run's models are at most so many folders inside it


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """What is exported, and to where. `reading` says how data is read, where it is not the run's own."""

    place: str  # a run, one of its models, another model's folder, or a name on the hub
    to: str
    out: Path
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
        path = Path(self.place)
        for folder in (path, *list(path.absolute().parents)[:FOLDERS]) if path.is_dir() else ():
            if (folder / "run.json").is_file():
                return folder
        return None

    @cached_property
    def folder(self) -> str:
        """Where the model is."""
        path = Path(self.place)
        inner = path / "model" / "config.json"
        return str(path / "model" if inner.is_file() else model_folder(path))

    @cached_property
    def record(self) -> dict[str, Any]:
        assert self.run is not None
        return finished_record(self.run)

    @cached_property
    def experiment(self) -> Experiment:
        """How data is read: as the run did, or as asked for."""
        own = {name: value for name, value in self.reading.items() if value is not None}
        if self.run is None:
            return Experiment(model=self.folder, data=self.data or "", **own)
        if self.data is None:
            return experiment_of(self.record).with_options(**own)
        return experiment_of(self.record).with_options(data=self.data, calibration=None, **own)


def check_request(request: ExportRequest, *, overwrite: bool) -> None:
    """What can be refused before anything is loaded."""
    runtime_of(request.to, request.quantize)
    if request.run is not None:
        request.record  # noqa: B018  # refuses a run that has not come to its end
        exports_of(request.run)  # and one whose list of exports is damaged
    refuse_missing_model(request.folder)
    if request.dense is not None:
        refuse_missing_model(request.dense)
    if request.quantize is not None and request.run is None and request.data is None:
        raise ExportError("A quantised model is checked by its metric, and there is no data; give some with --data.")
    if is_there(request.out, ExportError) and not overwrite and (request.out / RECORD).is_file():
        raise ExportError(f"{request.out} holds an export already; use --overwrite, or choose another folder.")


def run_export(request: ExportRequest, *, overwrite: bool = False) -> dict[str, Any]:
    """Export, and where the model belongs to a run, write it down there; returns the record."""
    check_request(request, overwrite=overwrite)
    model = load(request.folder, dtype=torch.float32)
    task = task_of(model, request.experiment.task)
    record = export(
        model,
        request.out,
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
        _note(request, request.run, record)
    return record


def _batches(request: ExportRequest, model: PreTrainedModel, task: Task) -> list[dict[str, Any]]:
    """The samples that the run was evaluated on, or those of the data that was given."""
    experiment = request.experiment
    if not experiment.data:
        return made_up_batches(model)
    if request.run is not None and request.data is None:
        _refuse_changed(request)
    own = experiment.processor is None or experiment.vocabulary
    examples = read_examples(experiment, model, task, experiment.data, request.folder if own else experiment.processor)
    if request.run is not None and request.data is None:
        calibration, evaluation = drawn(experiment, examples)
        examples = calibration if evaluation is None else evaluation
    chosen: Examples = examples.sample(request.samples, experiment.seed)
    return [dict(batch) for batch in chosen.batches(experiment.batch_size)]


def _refuse_changed(request: ExportRequest) -> None:
    then, now = request.record["settings"].get("data_fingerprint"), fingerprint(request.experiment.data)
    if then is not None and then != now:
        how = "is not there any more" if now is None else "has changed since"
        raise RunError(
            f"{request.experiment.data}, the data that {request.run} was made with, {how}; put it back, or give other "
            "data with --data."
        )


def _metric(request: ExportRequest) -> str | None:
    """The run's own; fidelity is to another model, which is not what is compared here."""
    name = None if request.run is None else request.record["result"]["metric"]
    return None if name == "fidelity" or request.data is not None else name


def _dense(request: ExportRequest) -> PreTrainedModel | None:
    """The model to be faster than: the one that was named, or that the run started from if it is there."""
    if request.dense is not None:
        return load(request.dense, dtype=torch.float32)
    if request.run is None:
        return None
    try:
        if experiment_of(request.record).vocabulary is not None:
            return load_subject(experiment_of(request.record)).model.float().cpu()
        return load(model_folder(request.experiment.model), dtype=torch.float32)
    except HeadpruneError as error:
        log.warning("The dense model cannot be loaded, so the export is not compared with it: %s", error)
        return None


def _note(request: ExportRequest, run: Path, record: Mapping[str, Any]) -> None:
    """In the run: what was exported, as what, and how it did. An earlier export of the same kind is replaced."""
    of = str(Path(request.folder).absolute().relative_to(run.absolute()))
    entry = {
        **record,
        "of": of,
        "out": str(request.out),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    kind = (of, record["runtime"], record["quantize"])
    others = [one for one in exports_of(run) if (one["of"], one["runtime"], one["quantize"]) != kind]
    entries = sorted([*others, entry], key=lambda one: (one["of"], one["runtime"], one["quantize"] or ""))
    write_exports(run, entries)
    card = run / of / "README.md"
    if card.is_file():
        write_text(card, with_exports(card.read_text(), [one for one in entries if one["of"] == of]))
    (run / "report.html").unlink(missing_ok=True)
    publish_run(run, request.record)
