"""A pruning experiment as the command line runs it: load, split, prune into a run directory, measure, save."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from headprune.criteria import make
from headprune.criteria.scoring import check_labels_word
from headprune.data import Columns, Examples, load_examples
from headprune.errors import DataError
from headprune.hooks.outputs import evaluating
from headprune.measure.metrics import choose_metric
from headprune.measure.quality import Quality
from headprune.measure.savings import savings
from headprune.measure.trajectory import Step, plain
from headprune.repair.solve import Compensation, check_compensation
from headprune.report.card import model_card
from headprune.report.page import write_report
from headprune.runs.journal import Run
from headprune.runs.subject import Task, load_task
from headprune.search.pruner import DEFAULT_COMPENSATION, DEFAULT_CRITERION, PruneResult, prune
from headprune.search.schedule import Schedule, Stop
from headprune.store.checkpoint import save
from headprune.store.files import write_text
from headprune.task.objectives import logits_of, model_inputs
from headprune.units import resolve


@dataclass(frozen=True)
class Experiment:
    """Everything that decides what a run does. Two runs with equal experiments give equal trajectories."""

    model: str
    data: str
    criterion: str = DEFAULT_CRITERION
    compensate: Compensation = DEFAULT_COMPENSATION
    keep: float | int | None = None
    max_drop: float | None = None
    knee: bool = False
    schedule: str = "greedy"
    every: int = 1
    min_per_site: int = 0
    explore: bool = False
    columns: Columns = field(default_factory=Columns)
    split: str | None = None
    calibration: str | None = None
    calibration_samples: int = 128
    evaluation_samples: int | None = None
    same_data: bool = False
    metric: str | None = None
    labels: str = "given"
    seed: int = 0
    batch_size: int = 32
    max_length: int = 128
    processor: str | None = None
    dtype: str = "float32"

    def settings(self) -> dict[str, Any]:
        """What `run.json` keeps and a resumed run must agree with, with fingerprints of the model and the data."""
        settings = asdict(self)
        settings["model_fingerprint"] = fingerprint(self.model)
        settings["data_fingerprint"] = fingerprint(self.data)
        if self.calibration is not None:
            settings["calibration_fingerprint"] = fingerprint(self.calibration)
        return settings


def fingerprint(place: str) -> str | None:
    """A hash of a file, of the config and weights in a model's folder, or of all files in another one; None for what
    is not on this machine."""
    path = Path(place)
    if path.is_file():
        files = [path]
    else:
        weights = sorted(path.glob("*.safetensors"))
        files = [*weights, path / "config.json"] if weights else sorted(f for f in path.rglob("*") if f.is_file())
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(path.parent)).encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:32]


def load(experiment: Experiment) -> tuple[Task, Examples, Examples | None]:
    """The task, its calibration examples, and its evaluation examples, None where calibration serves for both.

    Calibration and evaluation are drawn apart from the same data by the seed, or come from two files.
    """
    reading: dict[str, Any] = {
        "columns": experiment.columns,
        "split": experiment.split,
        "max_length": experiment.max_length,
        "seed": experiment.seed,
    }
    processor = experiment.processor or experiment.model
    task = load_task(experiment.model, experiment.data, processor=processor, dtype=experiment.dtype, **reading)
    task.check_labels(make(experiment.criterion), experiment.labels)
    wanted = experiment.calibration_samples
    if experiment.calibration is not None:
        other = load_examples(task.model, experiment.calibration, processor=processor, **reading)
        calibration = other.sample(wanted, experiment.seed)
        return task, calibration, task.examples.sample(experiment.evaluation_samples, experiment.seed)
    if experiment.same_data:
        return task, task.examples.sample(wanted, experiment.seed), None
    if len(task.examples) < 2:
        raise DataError(
            f"{experiment.data} has too few rows to keep calibration and evaluation apart; use --same-data."
        )
    calibration, rest = task.examples.split(min(wanted, len(task.examples) // 2), experiment.seed)
    return task, calibration, rest.sample(experiment.evaluation_samples, experiment.seed)


def check(experiment: Experiment, task: Task, evaluated: Examples) -> None:
    """Refuse what a run would refuse, before anything is written or an old run is overwritten."""
    Schedule(experiment.schedule, experiment.every, experiment.min_per_site)
    stop = Stop(experiment.keep, experiment.max_drop, experiment.knee)
    stop.heads_left(sum(site.heads for site in resolve(task.model)))
    check_labels_word(experiment.labels)
    check_compensation(experiment.compensate, task.model)
    sample = Quality()
    with torch.no_grad(), evaluating(task.model):
        (batch,) = evaluated.select([0]).batches(1)
        sample.add(task.model, batch, logits_of(task.model(**model_inputs(task.model, batch))))
    choose_metric(experiment.metric, task.model, sample)


def run_experiment(
    experiment: Experiment,
    out: Path,
    *,
    overwrite: bool = False,
    measure: bool = True,
    on_step: Callable[[Step], None] | None = None,
) -> dict[str, Any]:
    """Prune into the run directory `out`, going on where an earlier process stopped; returns its record."""
    task, calibration, evaluation = load(experiment)
    check(experiment, task, evaluation or calibration)
    with Run(out, experiment.settings(), overwrite=overwrite) as run:
        if run.finished:
            for step in run.steps:
                if on_step is not None:
                    on_step(step)
            _publish(out, run.record)
            return run.record
        held_out = None if evaluation is None else evaluation.batches(experiment.batch_size)
        result = prune(
            task.model,
            calibration.batches(experiment.batch_size),
            criterion=experiment.criterion,
            compensate=experiment.compensate,
            keep=experiment.keep,
            max_drop=experiment.max_drop,
            knee=experiment.knee,
            schedule=experiment.schedule,
            every=experiment.every,
            min_per_site=experiment.min_per_site,
            explore=experiment.explore,
            evaluation=held_out,
            metric=experiment.metric,
            labels=experiment.labels,  # type: ignore[arg-type]  # score refuses other words itself
            run=run,
            keep_dense=measure,
            on_step=on_step,
        )
        save(_in_precision_of(experiment.model, result.model), out / "model")
        record = {"samples": {"calibration": len(calibration), "evaluation": len(evaluation or calibration)}}
        record["result"] = _result(result)
        if measure and result.dense is not None:
            batch = (evaluation or calibration).batches(experiment.batch_size)[-1]
            folders = {"dense": Path(experiment.model), "pruned": out / "model"}
            record["savings"] = savings(result.dense, result.model, batch, folders=folders)
        run.finish(record)
        _publish(out, run.record)
        return run.record


def _publish(out: Path, record: dict[str, Any]) -> None:
    """The model card and the report of a finished run, unless they are there."""
    if not (out / "model" / "README.md").is_file():
        write_text(out / "model" / "README.md", model_card(record))
    if not (out / "report.html").is_file():
        write_report([out], out / "report.html")


def _in_precision_of(source: str, model: PreTrainedModel) -> PreTrainedModel:
    """The model in the precision that the dense one is stored in, whatever it was computed in. Its weights are a part
    of the dense ones, so nothing is lost but the rounding of output projections that were compensated."""
    stored = AutoConfig.from_pretrained(source, trust_remote_code=False).dtype
    return model if stored in (None, model.dtype) else copy.deepcopy(model).to(stored)


def _result(result: PruneResult) -> dict[str, Any]:
    dense, pruned = result.trajectory[0], result.result
    return {
        "step": result.stopped_at,
        "steps": len(result.trajectory) - 1,
        "metric": result.metric.name,
        "higher_is_better": result.metric.higher_is_better,
        "dense": plain(dense.metric),
        "pruned": plain(pruned.metric),
        "agreement": pruned.agreement,
        "heads_before": dense.heads,
        "heads_after": pruned.heads,
        "original_heads": [site.original_heads for site in resolve(result.model)],
        "mask": result.mask.int().tolist(),
    }
