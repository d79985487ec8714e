"""Runs a pruning experiment: loads model and data, splits the data, prunes into a run folder, measures and saves."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.checkpoint.atomic_files import write_text
from headprune.checkpoint.config_files import stored_dtype
from headprune.checkpoint.fingerprint import fingerprint
from headprune.checkpoint.layer_files import limit_memory_growth
from headprune.checkpoint.paths import is_run, model_folder
from headprune.checkpoint.save_load import load as load_model
from headprune.checkpoint.save_load import save
from headprune.data import Examples
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.measure.metrics import choose_metric
from headprune.measure.predictions import Predictions
from headprune.measure.savings import savings, shares
from headprune.measure.trajectory import Step, finite_or_none
from headprune.progress import Phase, report_phase
from headprune.repair.apply import check_repair
from headprune.reports.card import model_card
from headprune.reports.page import write_report
from headprune.run_folder import Run, write_card
from headprune.run_folder.exports import forget_exports
from headprune.runs.layerwise import check_prunable, clear_parts, prune_on_disk, refuse_unsupported
from headprune.runs.loading import RunInputs, find_device, load_run_inputs, read_examples
from headprune.runs.splits import calibration_count, split_data
from headprune.search.candidates import check_named_sites
from headprune.search.check_budget import refuse_unreachable
from headprune.search.config import Experiment, stop_settings
from headprune.search.observers import Observer, reporting_phases
from headprune.search.prune_result import PruneResult
from headprune.search.pruner import Pruner, run_to_end
from headprune.search.rescore import AUTO, EVERY
from headprune.search.settings import migrated
from headprune.tasks import Task, task_of
from headprune.units import kept_mask, resolve, sites_of, survey
from headprune.vocabulary.shrink import RECORD, Shrunk

EARLIER_CALIBRATION_SAMPLES = 128  # the default of earlier versions
__all__ = ["Experiment", "load", "run_experiment", "settings_of"]


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """The settings in `run.json`, which a resumed run must match, with fingerprints of the model and the data."""
    settings = experiment.settings()
    settings["model_fingerprint"] = fingerprint(model_folder(experiment.model))
    settings["data_fingerprint"] = fingerprint(experiment.data)
    if experiment.calibration is not None:
        settings["calibration_fingerprint"] = fingerprint(experiment.calibration)
    if experiment.vocabulary is not None:
        settings["vocabulary_fingerprint"] = [fingerprint(source) for source in experiment.vocabulary]
    return settings


def load(experiment: Experiment, *, on_disk: Path | None = None) -> tuple[RunInputs, Examples, Examples | None]:
    """The inputs of a run, its calibration examples, and its evaluation examples, None where both are the same.

    Calibration and evaluation examples are disjoint samples of the same data by the seed, or come from two files.
    """
    inputs = load_run_inputs(experiment, on_disk=on_disk)
    if experiment.calibration is None:
        inputs.check_labels(experiment.criterion, experiment.labels)
        calibration, evaluation = split_data(experiment, inputs.examples)
    else:
        converted = read_calibration(experiment, inputs.model, inputs.task, inputs.processor)
        inputs.check_labels(experiment.criterion, experiment.labels, converted)
        calibration = converted.sample(calibration_count(experiment, len(converted)), experiment.seed)
        evaluation = split_data(experiment, inputs.examples)[1]
    # A criterion that takes fewer takes them from the same rows, so that all runs evaluate on the same others.
    return inputs, calibration.sample(experiment.scored_samples, experiment.seed), evaluation


def read_calibration(experiment: Experiment, model: PreTrainedModel, task: Task, processor: Any) -> Examples:
    """The examples of the calibration data, which need no labels where the criterion needs none."""
    assert experiment.calibration is not None
    labels = experiment.criterion.needs_labels and experiment.labels == "given"
    return read_examples(experiment, model, task, experiment.calibration, processor, labels=labels)


def experiment_of(record: Mapping[str, Any]) -> Experiment:
    """The experiment in the record of a run."""
    settings = migrated(record["settings"])
    names = [field.name for field in fields(Experiment)]
    return Experiment(**{name: settings[name] for name in names if name in settings})


def check(experiment: Experiment, inputs: RunInputs, evaluated: Examples) -> None:
    """Raise the errors that the run would, but for those that need all calibration data."""
    model, task = inputs.model, inputs.task
    sites = sites_of(model, experiment.units)
    if experiment.schedule == "layerwise":
        check_prunable(experiment, model, task)
    check_named_sites(experiment, sites)
    refuse_unreachable(model, experiment, sites)
    check_repair(experiment.repair, model, published=experiment.method is not None)
    check_metric(experiment, inputs, evaluated)


def check_metric(experiment: Experiment, inputs: RunInputs, evaluated: Examples) -> None:
    """Raise the error of a metric that the predictions of the model do not have."""
    model, task = inputs.model, inputs.task
    sample = Predictions(task)
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
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Prune into the run folder `out`, resuming what an earlier process began; returns its record. `measure` the
    savings, `publish` a model card and a report.

    A finished run is extended, or shortened, when only its stopping rules differ. Several processes share the work;
    only the first one writes. In a layer-wise run the weights stay on disk.
    """
    observer = observer or Observer()
    if experiment.schedule != "layerwise":
        with reporting_phases(observer):
            return _run(experiment, out, overwrite, measure, publish, observer)
    refuse_unsupported(experiment)
    limit_memory_growth()
    with tempfile.TemporaryDirectory(prefix="headprune-") as folder, reporting_phases(observer):
        return _run(experiment, out, overwrite, False, publish, observer, Path(folder))


def with_earlier_defaults(experiment: Experiment, out: Path) -> Experiment:
    """The experiment, with the defaults of the version that started the run in `out`: earlier versions scored before
    every step, and calibrated on 128 samples."""
    if not is_run(out):  # something else is refused later
        return experiment
    settings = migrated(json.loads((out / "run.json").read_text())["settings"])
    earlier: dict[str, Any] = {"rescore": EVERY, "calibration_samples": EARLIER_CALIBRATION_SAMPLES}
    if experiment.rescore != AUTO:
        del earlier["rescore"]
    changes = {
        name: value
        for name, value in earlier.items()
        if experiment.explicit[name] is None and settings.get(name) == value
    }
    return experiment.with_options(**changes) if changes else experiment


def _run(
    experiment: Experiment,
    out: Path,
    overwrite: bool,
    measure: bool,
    publish: bool,
    observer: Observer,
    on_disk: Path | None = None,
) -> dict[str, Any]:
    experiment = experiment if overwrite else distributed.on_main(lambda: with_earlier_defaults(experiment, out))
    with distributed.fail_together():
        inputs, calibration, evaluation = load(experiment, on_disk=on_disk)
        check_inputs = check if experiment.schedule == "layerwise" else check_metric  # a pruner checks the rest
        check_inputs(experiment, inputs, evaluation or calibration)
        # Rows are prepared lazily; an error in one must not leave an incomplete run behind.
        calibrating = calibration.batches(experiment.batch_size, full=experiment.criterion.by_batch)
        held_out = None if evaluation is None else evaluation.batches(experiment.batch_size)
    pruner, main = None, distributed.is_main()
    if experiment.schedule != "layerwise":  # whose model is not in memory as a whole
        pruner = Pruner(
            inputs.model,
            calibrating,
            experiment,
            evaluation=held_out,
            observers=[observer] if main else (),
            at_point=(lambda label: _save_point(out, label, experiment, inputs.model)) if main else None,
        )
    # The layer-wise schedule decides everything at its start, so its stopping rules cannot change later.
    free = () if experiment.schedule == "layerwise" else stop_settings()
    with Run.open_on_main(out, lambda: settings_of(experiment), overwrite=overwrite, free=free) as run:
        if distributed.broadcast(run is not None and run.finished):
            for step in run.steps if run is not None else ():
                observer.replayed(step)
            return distributed.on_main(lambda: _publish(out, run, publish))
        if run is not None and run.changed and experiment.schedule not in ("rounds", "layerwise"):
            units = None if experiment.rescore == AUTO else experiment.every
            run.drop_short_step(units, [site.group for site in resolve(inputs.model)])
        if pruner is None:
            assert run is not None  # refused with several processes
            result = prune_on_disk(
                run,
                experiment,
                inputs.model,
                inputs.task,
                calibrating,
                held_out,
                device=find_device(experiment.device),
                observer=observer,
            )
        else:
            pruner.record_in(run)
            result = run_to_end(pruner, keep_dense=measure and run is not None)

        def finish() -> dict[str, Any]:
            assert run is not None
            samples = {"calibration": len(calibration), "evaluation": len(evaluation or calibration)}
            batch = (evaluation or calibration).longest(experiment.batch_size)
            run.finish(_finish(experiment, run, result, {"samples": samples, "task": inputs.task.name}, batch))
            return _publish(out, run, publish)

        return distributed.on_main(finish)


def _publish(out: Path, run: Run | None, publish: bool) -> dict[str, Any]:
    assert run is not None
    clear_parts(out)
    if publish:
        publish_run(out, run.record)
    return run.record


def _finish(
    experiment: Experiment, run: Run, result: PruneResult, record: dict[str, Any], batch: Mapping[str, Any]
) -> dict[str, Any]:
    """Save the pruned model, and measure the savings where the dense model is in memory; returns the record of the
    run."""
    out = run.path
    task = task_of(result.model, experiment.task)
    forget_exports(out)
    report_phase(Phase("saving the model"))
    if experiment.schedule != "layerwise":  # whose layers are written already
        save(cast_like_checkpoint(model_folder(experiment.model), result.model), out / "model", overwrite=True)
    record["result"] = result_json(result)
    points = _steps_of_points(result)
    for number in set(points) - set(result.points):
        _save_point(out, points[number], experiment, result.model, again=True)
    shrunk: Shrunk | None = getattr(result.model, RECORD, None)
    if shrunk is not None:
        record["vocabulary"] = shrunk.to_json()
    if result.dense is not None:
        folders = {"dense": model_folder(experiment.model), "pruned": out / "model"}
        if shrunk is not None:  # the dense model with the shrunk vocabulary is in no folder
            del folders["dense"]
        record["savings"] = savings(result.dense, result.model, batch, folders=folders, task=task)
        record["points"] = _points_json(result, points, out, batch, task, {**run.record, **record})
        if result.result.latency is not None:
            record["savings"]["shares"]["latency"] = round(result.result.latency, 4)
    return record


def _save_point(out: Path, label: str, experiment: Experiment, model: PreTrainedModel, *, again: bool = False) -> None:
    """Save the model at one point of a budget, unless an earlier process did."""
    folder = out / "models" / label
    if again or not folder.is_dir():
        save(cast_like_checkpoint(model_folder(experiment.model), model), folder, overwrite=True)


def _steps_of_points(result: PruneResult) -> dict[int, str]:
    """The steps of all points. Where a budget of time took rounds after the last point, that point is at the end of
    them."""
    last = max(result.points, default=result.stopped_at)
    if result.stopped_at <= last:
        return dict(result.points)
    return {result.stopped_at if number == last else number: label for number, label in result.points.items()}


def _points_json(
    result: PruneResult,
    points: Mapping[int, str],
    out: Path,
    batch: Mapping[str, Any],
    task: Task,
    record: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """The measurements of the model at each point of a budget, where there are several; writes its model card. For
    budgets of time the share of time is that of the budget."""
    assert result.dense is not None
    points_json = []
    for number, label in points.items():
        folder, step = out / "models" / label, result.trajectory[number]
        model = load_model(folder, dtype=result.dense.dtype).to(result.dense.device)
        mask = kept_mask(sites_of(model, tuple(step.units)))  # type: ignore[arg-type]  # its keys are kinds
        result_at_point = replace(
            result, model=model, stopped_at=number, mask=mask, rule=f"the point {label} of its budget"
        )
        write_text(
            folder / "README.md",
            model_card({**record, "result": result_json(result_at_point), "savings": None}, folder),
        )
        left = shares(result.dense, model, batch, task=task)
        if step.latency is not None:
            left["latency"] = round(step.latency, 4)
        points_json.append(
            {
                "label": label,
                "step": number,
                "model": f"models/{label}",
                "metric": finite_or_none(step.metric),
                "interval": None if step.interval is None else list(map(finite_or_none, step.interval)),
                "units": dict(step.units),
                "shares": left,
            }
        )
    return points_json


def publish_run(out: Path, record: dict[str, Any]) -> None:
    """Write the model card and the report of a finished run, unless they exist."""
    if not (out / "model" / "README.md").is_file():
        write_card(out, model_card(record, out / "model"))
    if not (out / "report.html").is_file():
        report_phase(Phase("writing the report"))
        write_report([out], out / "report.html")


def cast_like_checkpoint(source: Path, model: PreTrainedModel) -> PreTrainedModel:
    """The model in the stored precision of the dense one. Its weights are a part of the dense ones, so only repaired
    output projections are rounded."""
    stored = stored_dtype(str(source))
    if stored is None or stored == model.dtype:
        return model
    # Tensors are converted before the copy, so that there is no further copy in the precision of the computation.
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    converted: dict[int, Any] = {id(tensor): _convert(tensor, stored) for tensor in tensors}
    return copy.deepcopy(model, converted)


def _convert(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    converted = tensor.detach().to(dtype)
    return torch.nn.Parameter(converted, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else converted


def result_json(result: PruneResult) -> dict[str, Any]:
    dense, pruned = result.trajectory[0], result.result
    return {
        "step": result.stopped_at,
        "steps": len(result.trajectory) - 1,
        "rule": result.rule,
        "metric": result.metric.name,
        "higher_is_better": result.metric.higher_is_better,
        "dense": finite_or_none(dense.metric),
        "pruned": finite_or_none(pruned.metric),
        "dense_interval": None if dense.interval is None else list(map(finite_or_none, dense.interval)),
        "pruned_interval": None if pruned.interval is None else list(map(finite_or_none, pruned.interval)),
        "agreement": pruned.agreement,
        "units": {kind: [count, pruned.units.get(kind, 0)] for kind, count in dense.units.items()},
        "heads_before": dense.heads,
        "heads_after": pruned.heads,
        "original_heads": [site.original for site in survey(result.model).sites],
        "mask": _attention(dense, result.mask).int().tolist(),
        **_widths(dense, pruned),
        **({"unreached": {str(site): path for site, path in result.unreached.items()}} if result.unreached else {}),
    }


def _attention(dense: Step, mask: torch.Tensor) -> torch.Tensor:
    """The part of a mask with heads: that of neurons has thousands of columns, and is in the config of the model."""
    return mask if dense.attention is None else mask[: dense.attention[0], : dense.attention[1]]


def _widths(dense: Step, pruned: Step) -> dict[str, Any]:
    """Per feed-forward site: its neurons before and after."""
    widths = {str(site): [width, pruned.widths.get(site, 0)] for site, width in dense.widths.items()}
    return {"widths": widths} if widths else {}
