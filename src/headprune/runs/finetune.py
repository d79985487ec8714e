"""Recovers the pruned model of a run by fine-tuning, in the folder of the run: once, or in cycles of pruning and
training."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headprune import distributed
from headprune.checkpoint.atomic_files import write_text
from headprune.checkpoint.save_load import save
from headprune.errors import RunError, TrainingError
from headprune.json_forms import check_form
from headprune.measure.trajectory import finite_or_none
from headprune.reports.card import RECOVERED, run_card
from headprune.reports.format import left_text
from headprune.reports.recovery import origin
from headprune.run_folder import RecoveryFolder
from headprune.run_folder.exports import forget_exports
from headprune.run_folder.record_forms import CYCLE
from headprune.run_folder.recovery import FOLDER
from headprune.runs.cycle_targets import split_target
from headprune.runs.experiment import cast_like_checkpoint, publish_run, run_experiment
from headprune.runs.recovery_job import (
    RecoveryInputs,
    RecoveryRequest,
    load_model,
    load_recovery_inputs,
    metric_json,
    refuse_changes,
)
from headprune.search.observers import Observer, reporting_phases
from headprune.training.fit import FitResult, fit, need_training
from headprune.training.schedule import Evaluation, LogCallback

ROUND = "round.json"  # in the folder of a cycle: the measurements after its recovery


def run_finetune(
    request: RecoveryRequest,
    *,
    overwrite: bool = False,
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Recover a run's model into its folder `finetuned`, resuming what an earlier process began; returns its record.

    With several cycles the target of the run is reached from the dense model in parts, each of which is pruned and then
    trained.
    """
    observer = observer or Observer()
    with reporting_phases(observer):
        return _run_finetune(request, observer, overwrite=overwrite)


def _run_finetune(request: RecoveryRequest, observer: Observer, *, overwrite: bool) -> dict[str, Any]:
    need_training(request.config)
    experiment = request.experiment
    if request.rounds > 1 and request.record["settings"].get("gates"):
        raise TrainingError(
            "Cycles repeat a run of `headprune prune`, and this one has learned gates; leave out --cycles."
        )
    targets = split_target(experiment, request.record["result"], request.rounds) if request.rounds > 1 else []
    if targets and request.point is not None:
        raise TrainingError("Cycles lead to the target of the run; leave out --point, or --cycles.")
    settings, recovery_folder = request.settings(), request.run / FOLDER
    if not overwrite and distributed.on_main(lambda: RecoveryFolder.is_finished(recovery_folder, settings)):
        # Neither the data nor the dense model is needed.
        with RecoveryFolder.open_on_main(recovery_folder, lambda: settings) as folder:
            return distributed.on_main(lambda: _publish(request, folder))
    with distributed.fail_together():
        refuse_changes(request)
    inputs = load_recovery_inputs(request)
    with RecoveryFolder.open_on_main(recovery_folder, lambda: settings, overwrite=overwrite) as folder:
        if not distributed.broadcast(folder is not None and folder.finished):
            recover = _in_cycles if targets else _recover_once
            fits, model, rounds = recover(inputs, recovery_folder, targets, observer)
            result = _result(inputs, fits, model, rounds)
            distributed.on_main(lambda: _save_result(request, folder, model, result))
        return distributed.on_main(lambda: _publish(request, folder))


def _save_result(
    request: RecoveryRequest,
    folder: RecoveryFolder | None,
    model: PreTrainedModel,
    result: Mapping[str, Any],
) -> None:
    """Save the recovered model with its card, and the record."""
    assert folder is not None
    forget_exports(request.run, f"{folder.path.name}/model")
    save(cast_like_checkpoint(request.source, model), folder.path / "model", overwrite=True)
    card = run_card(request.run, RECOVERED, recovery={**folder.record, **result})
    write_text(folder.path / "model" / "README.md", card)
    folder.finish(result)
    (request.run / "report.html").unlink(missing_ok=True)


def _publish(request: RecoveryRequest, folder: RecoveryFolder | None) -> dict[str, Any]:
    assert folder is not None
    for leftover in (folder.path / "trainer", *folder.path.glob("round-*/trainer")):
        shutil.rmtree(leftover, ignore_errors=True)
    publish_run(request.run, request.record)
    return folder.record


Recovery = tuple[list[FitResult], PreTrainedModel, list[dict[str, Any]]]


def _recover_once(inputs: RecoveryInputs, folder: Path, targets: Any, observer: Observer) -> Recovery:
    model = load_model(inputs.request.source, inputs.request.experiment)
    return [_fit(inputs, model, inputs.pruned.value, folder / "trainer", observer)], model, []


def _in_cycles(
    inputs: RecoveryInputs,
    folder: Path,
    targets: Sequence[Mapping[str, Any]],
    observer: Observer,
) -> Recovery:
    """Prune to a part of the target, recover, and so on; a cycle with a record is not repeated."""
    experiment = inputs.request.experiment
    start, cycles = experiment.model, []
    for number, part in enumerate(targets, start=1):
        cycle_folder = folder / f"round-{number}"
        settings = experiment.with_options(model=str(start), **part)
        if number > 1 and experiment.vocabulary is not None:  # which was shrunk in the first cycle
            settings = settings.with_options(vocabulary=None, processor=None)
        start = str(cycle_folder / "recovered")
        record_of_cycle = distributed.broadcast(_read_cycle(cycle_folder))
        if record_of_cycle is not None:
            cycles.append(record_of_cycle)
            continue
        observer_of_cycle = observer.run(f"Round {number} of {len(targets)}")
        record = run_experiment(settings, cycle_folder, measure=False, publish=False, observer=observer_of_cycle)
        model = load_model(cycle_folder / "model", experiment)
        before = inputs.measure(model)
        fitted = _fit(inputs, model, before.value, cycle_folder / "trainer", observer_of_cycle)
        units = {kind: count for kind, (count, _) in inputs.request.record["result"]["units"].items()}
        left = {kind: count for kind, (_, count) in record["result"]["units"].items()}
        about = {
            "left": left_text(units, left),
            "pruned": metric_json(before),
            "recovered": metric_json(inputs.measure(model)),
            "fitted": _fit_json(fitted),
        }
        distributed.on_main(functools.partial(_save_cycle, cycle_folder, model, about))
        cycles.append(json.loads(json.dumps(about)))
    fits = [_fit_from_json(cycle.pop("fitted")) for cycle in cycles]
    return fits, load_model(Path(start), experiment), cycles


def _read_cycle(cycle_folder: Path) -> dict[str, Any] | None:
    file = cycle_folder / ROUND
    if not file.is_file():
        return None
    try:
        record: dict[str, Any] = json.loads(file.read_bytes())
        check_form(record, CYCLE)
    except (ValueError, RecursionError):
        raise RunError(f"{file} is damaged; recover the model again with --overwrite.") from None
    return record


def _save_cycle(cycle_folder: Path, model: PreTrainedModel, about: Mapping[str, Any]) -> None:
    save(cast_like_checkpoint(cycle_folder / "model", model), cycle_folder / "recovered", overwrite=True)
    write_text(cycle_folder / ROUND, json.dumps(about) + "\n")


def _fit(inputs: RecoveryInputs, model: PreTrainedModel, before: float, folder: Path, observer: Observer) -> FitResult:
    return fit(
        model,
        inputs.training,
        task=inputs.task,
        config=inputs.request.config,
        folder=folder,
        teacher=inputs.teacher,
        callbacks=[LogCallback(observer, inputs.metric.name, before)],
        metric=inputs.metric.name,
    )


def _result(
    inputs: RecoveryInputs, fits: Sequence[FitResult], model: PreTrainedModel, rounds: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    last = fits[-1]
    history, steps_before = [], 0
    for fit_result in fits:
        history += [{**entry, "step": entry["step"] + steps_before} for entry in fit_result.history]
        steps_before += fit_result.steps
    return {
        "of": origin(inputs.request.record),
        "task": inputs.task.name,
        "metric": inputs.metric.name,
        "higher_is_better": inputs.metric.higher_is_better,
        "samples": {
            "training": last.samples,
            "evaluation": inputs.evaluated,
        },
        "dense": inputs.dense,
        "pruned": metric_json(inputs.pruned),
        "recovered": metric_json(inputs.measure(model)),
        "steps": last.steps,
        "best_step": last.best_step,
        "stopped_early": last.stopped_early,
        "chosen_by": last.metric,
        "evaluations": [[fit_result.step, finite_or_none(fit_result.value)] for fit_result in last.evaluations],
        "seconds": round(sum(fit_result.seconds for fit_result in fits), 2),
        "rounds": list(rounds),
        "notes": inputs.notes,
        "history": history,
    }


def _fit_json(fitted: FitResult) -> dict[str, Any]:
    return {**vars(fitted), "evaluations": [list(evaluation) for evaluation in fitted.evaluations]}


def _fit_from_json(value: Mapping[str, Any]) -> FitResult:
    values = {field.name: value[field.name] for field in dataclasses.fields(FitResult)}
    return FitResult(**{**values, "evaluations": [Evaluation(*evaluation) for evaluation in value["evaluations"]]})
