"""A pruning experiment as the command line runs it: load, split, prune into a run directory, measure, save."""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.data import Examples
from headprune.errors import DataError
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.measure.metrics import choose_metric
from headprune.measure.quality import Quality
from headprune.measure.savings import savings, shares
from headprune.measure.trajectory import Step, plain
from headprune.repair.apply import check_repair
from headprune.report.card import model_card
from headprune.report.exports import forget_exports
from headprune.report.page import write_report
from headprune.runs.journal import Run, opened
from headprune.runs.layerwise import OnLayer, check_prunable, clear_parts, prune_on_disk, refuse_unsuited
from headprune.runs.subject import Subject, find_device, load_subject, read_examples
from headprune.search.config import Experiment, stop_settings
from headprune.search.pruner import PruneResult, prune
from headprune.search.rescore import AUTO, EVERY
from headprune.search.schedules.rounds import refuse_unreachable
from headprune.search.settings import migrated
from headprune.store.checkpoint import load as load_model
from headprune.store.checkpoint import save
from headprune.store.configs import stored_dtype
from headprune.store.files import write_text
from headprune.store.layer_files import give_memory_back
from headprune.store.places import model_folder
from headprune.tasks import Task, task_of
from headprune.units import kept_mask, resolve, sites_of, survey
from headprune.vocabulary.shrink import RECORD, Shrunk

__all__ = ["Experiment", "fingerprint", "load", "run_experiment", "settings_of"]


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """What `run.json` keeps and a resumed run must agree with, with fingerprints of the model and the data."""
    settings = experiment.settings()
    settings["model_fingerprint"] = fingerprint(str(model_folder(experiment.model)))
    settings["data_fingerprint"] = fingerprint(experiment.data)
    if experiment.calibration is not None:
        settings["calibration_fingerprint"] = fingerprint(experiment.calibration)
    if experiment.vocabulary is not None:
        settings["vocabulary_fingerprint"] = [fingerprint(source) for source in experiment.vocabulary]
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


def load(experiment: Experiment, *, on_disk: Path | None = None) -> tuple[Subject, Examples, Examples | None]:
    """The subject, its calibration examples, and its evaluation examples, None where calibration serves for both.

    Calibration and evaluation are drawn apart from the same data by the seed, or come from two files.
    """
    subject = load_subject(experiment, on_disk=on_disk)
    subject.check_labels(experiment.criterion, experiment.labels)
    if experiment.calibration is None:
        return subject, *drawn(experiment, subject.examples)
    other = read_examples(experiment, subject.model, subject.task, experiment.calibration, subject.processor)
    calibration = other.sample(experiment.calibration_samples, experiment.seed)
    return subject, calibration, drawn(experiment, subject.examples)[1]


def drawn(experiment: Experiment, examples: Examples) -> tuple[Examples, Examples | None]:
    """The examples of the data that calibrate (none of them, where other data does), and those that evaluate; None
    where these are the same."""
    wanted, seed = experiment.calibration_samples, experiment.seed
    if experiment.calibration is not None:
        return examples.select([]), examples.sample(experiment.evaluation_samples, seed)
    if experiment.same_data:
        return examples.sample(wanted, seed), None
    if len(examples) < 2:
        raise DataError(
            f"{experiment.data} has too few rows to keep calibration and evaluation apart; use --same-data."
        )
    calibration, rest = examples.split(min(wanted, len(examples) // 2), seed)
    return calibration, rest.sample(experiment.evaluation_samples, seed)


def experiment_of(record: Mapping[str, Any]) -> Experiment:
    """The experiment that a run was made by."""
    settings = migrated(record["settings"])
    names = [field.name for field in fields(Experiment)]
    return Experiment(**{name: settings[name] for name in names if name in settings})


def check(experiment: Experiment, subject: Subject, evaluated: Examples) -> None:
    """Refuse what a run would refuse, before anything is written or an old run is overwritten."""
    model, task = subject.model, subject.task
    sites = sites_of(model, experiment.units)
    experiment.stop.units_left(sum(site.size for site in sites if site.kind in experiment.units))
    if experiment.schedule == "layerwise":
        check_prunable(experiment, model, task)
    refuse_unreachable(model, experiment)
    check_repair(experiment.repair, model, published=experiment.method is not None)
    sample = Quality(task)
    with torch.no_grad(), evaluating(model):
        (batch,) = evaluated.select([0]).batches(1)
        prepared = task.prepare(batch, input_device(model))
        sample.add(prepared, model(**task.inputs(prepared)))
    choose_metric(experiment.metric, sample)


def run_experiment(
    experiment: Experiment,
    out: Path,
    *,
    overwrite: bool = False,
    measure: bool = True,
    publish: bool = True,
    on_step: Callable[[Step], None] | None = None,
    on_layer: OnLayer | None = None,
) -> dict[str, Any]:
    """Prune into the run directory `out`, going on where an earlier process stopped; returns its record. `measure` what
    was saved, `publish` a model card and a report.

    A finished run is taken further, or back, when only its rules to stop are others. Several processes share the work;
    the first one alone writes. A sweep leaves the model on disk, and tells `on_layer` of each layer that is done.
    """
    if experiment.schedule != "layerwise":
        return _run(experiment, out, overwrite, measure, publish, on_step)
    refuse_unsuited(experiment)
    give_memory_back()
    with tempfile.TemporaryDirectory(prefix="headprune-") as folder:
        return _run(experiment, out, overwrite, False, publish, on_step, on_layer, Path(folder))


def _as_begun(experiment: Experiment, out: Path) -> Experiment:
    """The experiment, with the default of the version that began the run in `out`: earlier ones scored before every
    step."""
    if experiment.asked["rescore"] is not None or experiment.rescore != AUTO:
        return experiment
    try:
        begun = migrated(json.loads((out / "run.json").read_text())["settings"])
    except (OSError, ValueError, KeyError, TypeError):  # no run, or a damaged one, which is refused with a sentence
        return experiment
    return experiment.with_options(rescore=EVERY) if begun["rescore"] == EVERY else experiment


def _run(
    experiment: Experiment,
    out: Path,
    overwrite: bool,
    measure: bool,
    publish: bool,
    on_step: Callable[[Step], None] | None,
    on_layer: OnLayer | None = None,
    on_disk: Path | None = None,
) -> dict[str, Any]:
    experiment = experiment if overwrite else distributed.on_main(lambda: _as_begun(experiment, out))
    with distributed.fail_together():
        subject, calibration, evaluation = load(experiment, on_disk=on_disk)
        check(experiment, subject, evaluation or calibration)
        # Rows are prepared when they are asked for, and one that cannot be must not leave half a run behind.
        calibrating = calibration.batches(experiment.batch_size, full=experiment.criterion.by_batch)
        held_out = None if evaluation is None else evaluation.batches(experiment.batch_size)
    # A sweep decides everything at its start, so none of its rules to stop can change on the way.
    free = () if experiment.schedule == "layerwise" else stop_settings()
    with opened(out, lambda: settings_of(experiment), overwrite=overwrite, free=free) as run:
        if distributed.broadcast(run is not None and run.finished):
            if on_step is not None:
                for step in run.steps if run is not None else ():
                    on_step(step)
            return distributed.on_main(lambda: _published(out, run, publish))
        if run is not None and run.changed and experiment.schedule not in ("rounds", "layerwise"):
            units = None if experiment.rescore == AUTO else experiment.every
            run.drop_short_step(units, [site.group for site in resolve(subject.model)])
        if experiment.schedule == "layerwise":
            assert run is not None  # of several processes it is refused
            given = run, experiment, subject.model, subject.task, calibrating, held_out
            device = find_device(experiment.device)
            result = prune_on_disk(*given, device=device, on_step=on_step, on_layer=on_layer)
        else:
            result = prune(
                subject.model,
                calibrating,
                config=experiment,
                evaluation=held_out,
                run=run,
                on_step=on_step,
                keep_dense=measure and run is not None,
                at_point=lambda label: _keep_point(out, label, experiment, subject.model),
            )

        def conclude() -> dict[str, Any]:
            assert run is not None
            samples = {"calibration": len(calibration), "evaluation": len(evaluation or calibration)}
            batch = (evaluation or calibration).longest(experiment.batch_size)
            run.finish(_concluded(experiment, run, result, {"samples": samples, "task": subject.task.name}, batch))
            return _published(out, run, publish)

        return distributed.on_main(conclude)


def _published(out: Path, run: Run | None, publish: bool) -> dict[str, Any]:
    assert run is not None
    clear_parts(out)
    if publish:
        publish_run(out, run.record)
    return run.record


def _concluded(
    experiment: Experiment, run: Run, result: PruneResult, record: dict[str, Any], batch: Mapping[str, Any]
) -> dict[str, Any]:
    """Save what came out, and measure what it saves where the dense model is there; what the run's record is to say."""
    out = run.path
    task = task_of(result.model, experiment.task)
    forget_exports(out)
    if experiment.schedule != "layerwise":  # which has written it layer by layer
        save(in_precision_of(model_folder(experiment.model), result.model), out / "model")
    record["result"] = record_of(result)
    points = _settled(result)
    for number in set(points) - set(result.points):
        _keep_point(out, points[number], experiment, result.model, again=True)
    shrunk: Shrunk | None = getattr(result.model, RECORD, None)
    if shrunk is not None:
        record["vocabulary"] = shrunk.to_json()
    if result.dense is not None:
        folders = {"dense": model_folder(experiment.model), "pruned": out / "model"}
        if shrunk is not None:  # the one that is measured is in no folder
            del folders["dense"]
        record["savings"] = savings(result.dense, result.model, batch, folders=folders, task=task)
        record["points"] = _points(result, points, out, batch, task, {**run.record, **record})
        if result.result.latency is not None:
            record["savings"]["shares"]["latency"] = round(result.result.latency, 4)
    return record


def _keep_point(out: Path, label: str, experiment: Experiment, model: PreTrainedModel, *, again: bool = False) -> None:
    """The model of one point of a budget, unless an earlier process wrote it."""
    folder = out / "models" / label
    if again or not folder.is_dir():
        save(in_precision_of(model_folder(experiment.model), model), folder)


def _settled(result: PruneResult) -> dict[int, str]:
    """The steps of all points. Where the clock asked for rounds after that of the last point, it is where they end."""
    last = max(result.points, default=result.stopped_at)
    if result.stopped_at <= last:
        return dict(result.points)
    return {result.stopped_at if number == last else number: label for number, label in result.points.items()}


def _points(
    result: PruneResult,
    points: Mapping[int, str],
    out: Path,
    batch: Mapping[str, Any],
    task: Task,
    record: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """What was measured of the model at each point of a budget, where there are several, and its model card; for
    budgets of time, the time is that which the budget counts."""
    assert result.dense is not None
    found = []
    for number, label in points.items():
        folder, step = out / "models" / label, result.trajectory[number]
        model = load_model(folder, dtype=result.dense.dtype).to(result.dense.device)
        mask = kept_mask(sites_of(model, tuple(step.units)))  # type: ignore[arg-type]  # whose keys are kinds
        at = replace(result, model=model, stopped_at=number, mask=mask, rule=f"the point {label} of its budget")
        write_text(folder / "README.md", model_card({**record, "result": record_of(at), "savings": None}, folder))
        left = shares(result.dense, model, batch, task=task)
        if step.latency is not None:
            left["latency"] = round(step.latency, 4)
        found.append(
            {
                "label": label,
                "step": number,
                "model": f"models/{label}",
                "metric": plain(step.metric),
                "interval": None if step.interval is None else list(map(plain, step.interval)),
                "units": dict(step.units),
                "shares": left,
            }
        )
    return found


def publish_run(out: Path, record: dict[str, Any]) -> None:
    """The model card and the report of a finished run, unless they are there."""
    if not (out / "model" / "README.md").is_file():
        write_text(out / "model" / "README.md", model_card(record, out / "model"))
    if not (out / "report.html").is_file():
        write_report([out], out / "report.html")


def in_precision_of(source: Path, model: PreTrainedModel) -> PreTrainedModel:
    """The model in the precision that the dense one is stored in, whatever it was computed in. Its weights are a part
    of the dense ones, so nothing is lost but the rounding of output projections that were compensated."""
    stored = stored_dtype(str(source))
    if stored is None or stored == model.dtype:
        return model
    # Tensors are converted before the copy is made, so that there is no third one in the precision of computing.
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    converted: dict[int, Any] = {id(tensor): _converted(tensor, stored) for tensor in tensors}
    return copy.deepcopy(model, converted)


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    other = tensor.detach().to(dtype)
    return torch.nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else other


def record_of(result: PruneResult) -> dict[str, Any]:
    dense, pruned = result.trajectory[0], result.result
    return {
        "step": result.stopped_at,
        "steps": len(result.trajectory) - 1,
        "rule": result.rule,
        "metric": result.metric.name,
        "higher_is_better": result.metric.higher_is_better,
        "dense": plain(dense.metric),
        "pruned": plain(pruned.metric),
        "dense_interval": None if dense.interval is None else list(map(plain, dense.interval)),
        "pruned_interval": None if pruned.interval is None else list(map(plain, pruned.interval)),
        "agreement": pruned.agreement,
        "units": {kind: [count, pruned.units.get(kind, 0)] for kind, count in dense.units.items()},
        "heads_before": dense.heads,
        "heads_after": pruned.heads,
        "original_heads": [site.original for site in survey(result.model).sites],
        "mask": _attention(dense, result.mask).int().tolist(),
        **_widths(dense, pruned),
    }


def _attention(dense: Step, mask: torch.Tensor) -> torch.Tensor:
    """The part of a mask that is about heads: that of neurons has thousands of columns, and the model knows it."""
    return mask if dense.attention is None else mask[: dense.attention[0], : dense.attention[1]]


def _widths(dense: Step, pruned: Step) -> dict[str, Any]:
    """Per feed-forward site: how many neurons there were, and how many are left."""
    found = {str(site): [width, pruned.widths.get(site, 0)] for site, width in dense.widths.items()}
    return {"widths": found} if found else {}
