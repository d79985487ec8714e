"""Trains learned gates into a run folder, as `prune` writes it, and then fine-tunes the pruned model in it.

run.json, steps.jsonl, model/, report.html    as for every run; step 1 is the removal of closed units
gates.jsonl                                   how open each gate was, over the steps of the training
training/                                     checkpoints of the training, until it ends
finetuned/                                    the fine-tuned model
"""

from __future__ import annotations

import copy
import dataclasses
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback

from headprune import distributed
from headprune.checkpoint.fingerprint import fingerprint
from headprune.checkpoint.paths import model_folder
from headprune.checkpoint.save_load import save
from headprune.data import Examples
from headprune.display import counted
from headprune.errors import DataError, TrainingError
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import Metric, choose_metric
from headprune.measure.predictions import Predictions
from headprune.measure.savings import savings
from headprune.run_folder import Run
from headprune.run_folder.exports import forget_exports
from headprune.run_folder.recovery import FOLDER, refuse_unremovable, remove_recovery
from headprune.runs.experiment import cast_like_checkpoint, publish_run, result_json, settings_of
from headprune.runs.finetune import run_finetune
from headprune.runs.loading import RunInputs, load_run_inputs, read_examples
from headprune.runs.recovery_job import RecoveryRequest, separate_rows
from headprune.runs.splits import split_data
from headprune.search.candidates import Candidates, training_candidates
from headprune.search.config import Experiment
from headprune.search.observers import Observer, reporting_phases
from headprune.search.prune_result import PruneResult
from headprune.search.schedules.schedule import Removal
from headprune.search.step import describe
from headprune.training.config import TrainConfig
from headprune.training.fit import fit, need_training, refuse_nothing_to_learn
from headprune.training.gate_callback import GateCallback
from headprune.training.gate_config import GateConfig, reaching_rate
from headprune.training.gate_journal import GateJournal
from headprune.training.learned_gates import LearnedGates
from headprune.training.schedule import LogCallback
from headprune.units import kept_mask, sites_of, widest

HELD_OUT_PART = 10  # one row of this many is held out for evaluation, without other data for it
MAX_HELD_OUT = 2000  # rows


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """What is trained, on which data, and for how long. Without `evaluation` a part of the data is held out for it."""

    experiment: Experiment  # the model, how data is read, and the metric
    gates: GateConfig
    config: TrainConfig = field(default_factory=TrainConfig)
    evaluation: str | None = None
    finetune_epochs: float = 1.0
    explicit_rate: bool = False  # whether the learning rate of gates was set by the user

    def __post_init__(self) -> None:
        if not 0 <= self.finetune_epochs < math.inf:
            raise TrainingError(f"finetune_epochs must be a number of at least 0, but it is {self.finetune_epochs:g}.")
        if self.config.lora:
            raise TrainingError("Gates learn with all weights; LoRA goes with `headprune finetune`, or in Python.")

    @property
    def data(self) -> str:
        """The training data."""
        return self.experiment.data

    @property
    def evaluated(self) -> Experiment:
        """The experiment as in a run of `prune`: with evaluation data as its data."""
        if self.evaluation is None:
            return self.experiment.with_options(repair="none")
        return self.experiment.with_options(data=self.evaluation, calibration=self.data, repair="none")


@dataclass
class _TrainInputs:
    """The inputs of a training."""

    base: RunInputs
    experiment: Experiment
    training: Examples
    held_out: Examples
    evaluation: Sequence[Mapping[str, Any]]  # in batches

    def predictions(self, model: PreTrainedModel) -> Predictions:
        return Evaluator(self.evaluation, self.base.task, cache_bytes=0)(model, ())


def run_training(
    request: TrainRequest,
    out: Path,
    *,
    overwrite: bool = False,
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Train gates into the run folder `out`, remove closed units, and fine-tune, resuming what an earlier process
    began. Returns the record of the run, with that of the fine-tuning under "recovery"."""
    observer = observer or Observer()
    with reporting_phases(observer):
        return _run_training(request, out, observer, overwrite=overwrite)


def _run_training(request: TrainRequest, out: Path, observer: Observer, *, overwrite: bool) -> dict[str, Any]:
    need_training(request.config)
    finetuning = replace(request.config, epochs=request.finetune_epochs) if request.finetune_epochs else None
    with distributed.fail_together():
        inputs = _load(request)
        task, config = inputs.base.task, request.config
        refuse_nothing_to_learn(task, inputs.training, config.distill > 0 or config.hidden > 0)
    model, dense = inputs.base.model, copy.deepcopy(inputs.base.model)
    reference = inputs.predictions(dense)
    metric = choose_metric(request.experiment.metric, reference)
    gates = _with_rate(request, inputs)
    sites = sites_of(model, gates.kinds)
    batches = inputs.training.batches(request.config.batch_size)
    candidates = training_candidates(model, [site for site in sites if site.kind in gates.kinds], batches, task)
    learned = LearnedGates(model, gates, sites=candidates.among(sites))
    if overwrite:
        distributed.on_main(lambda: refuse_unremovable(out / FOLDER))
    # All errors of the input have been raised by now; from here on the folder is written to.
    with Run.open_on_main(out, lambda: _settings(request, inputs, learned.config), overwrite=overwrite) as run:
        if run is not None and overwrite and not run.steps:
            shutil.rmtree(out / "training", ignore_errors=True)
            remove_recovery(out / FOLDER)
        if distributed.broadcast(run is not None and run.finished):
            for step in run.steps if run is not None else ():
                observer.replayed(step)
        else:
            _learn(request, inputs, out, run, learned, candidates, dense, (reference, metric), observer)
        record = distributed.on_main(lambda: _publish(out, run))
    if finetuning is None:
        return record
    recovery = run_finetune(RecoveryRequest(run=out, data=request.data, config=finetuning), observer=observer)
    return {**record, "recovery": recovery}


def _publish(out: Path, run: Run | None) -> dict[str, Any]:
    assert run is not None
    publish_run(out, run.record)
    return run.record


def _learn(
    request: TrainRequest,
    inputs: _TrainInputs,
    out: Path,
    run: Run | None,  # in the first process only
    learned: LearnedGates,
    candidates: Candidates,
    dense: PreTrainedModel,
    measured: tuple[Predictions, Metric],
    observer: Observer,
) -> None:
    model, task, kinds = inputs.base.model, inputs.base.task, learned.config.kinds
    reference, metric = measured
    steps_before = distributed.broadcast(0 if run is None else len(run.steps))

    def record_step(removal: Removal, model_of_step: PreTrainedModel, seconds: float) -> None:
        predictions = reference if model_of_step is dense else inputs.predictions(model_of_step)
        if run is None:
            return
        about = len(run.steps), removal, predictions, reference, metric.of(predictions, reference)
        step = describe(model_of_step, sites_of(model_of_step, kinds), kinds, *about)
        for listener in (run, observer):
            listener.step(step, {"seconds": seconds})

    if not steps_before:
        record_step(Removal(), dense, 0.0)
    callbacks: list[TrainerCallback] = [GateCallback(gates=learned), GateJournal(learned, out)]
    fitted = fit(
        model,
        inputs.training,
        task=task,
        # The best of several evaluations would be one with more units: only the end counts.
        config=replace(request.config, validation=0.0, patience=None),
        folder=out / "training",
        teacher=dense,
        callbacks=[*callbacks, LogCallback(observer, metric.name, metric.of(reference, reference).value)],
    )
    learned.total = fitted.steps  # not set where an earlier process finished the training
    gate_report, scores = learned.report(), _scores(learned, model)
    closed = tuple(learned.closed())
    closed_scores = [float(scores[member.site, member.index]) for member in closed]
    samples = task.prepare(
        inputs.training.select([0, 1][: len(inputs.training)]).batches(2, full=True)[0], model.device
    )
    learned.remove(verify=task.inputs(samples))
    mean = sum(closed_scores) / len(closed_scores) if closed_scores else None
    if steps_before < 2:  # unless an earlier process did
        record_step(Removal(closed, mean, scores), model, fitted.seconds)

    def finish() -> None:
        assert run is not None
        result = PruneResult(
            model,
            dense,
            run.steps,
            len(run.steps) - 1,
            metric,
            kept_mask(sites_of(model, kinds)),
            _rule(request.gates),
            unreached={**candidates.unreached, **{site.index: site.path for site in learned.reach.sites()}},
        )
        _finish(request, inputs, run, result, {"steps": fitted.steps, **gate_report})
        shutil.rmtree(out / "training", ignore_errors=True)

    distributed.on_main(finish)


def _finish(
    request: TrainRequest,
    inputs: _TrainInputs,
    run: Run,
    result: PruneResult,
    gate_report: Mapping[str, Any],
) -> None:
    model, source = result.model, model_folder(inputs.experiment.model)
    forget_exports(run.path)
    save(cast_like_checkpoint(source, model), run.path / "model", overwrite=True)
    folders = {"dense": source, "pruned": run.path / "model"}
    batch = inputs.held_out.longest(inputs.experiment.batch_size)
    run.finish(
        {
            "samples": {"training": len(inputs.training), "evaluation": len(inputs.held_out)},
            "task": inputs.base.task.name,
            "result": result_json(result),
            "gates": dict(gate_report),
            "savings": savings(result.dense, model, batch, folders=folders, task=inputs.base.task),
        }
    )


def _load(request: TrainRequest) -> _TrainInputs:
    """The model in float32, which training needs, the training rows, and the evaluation rows."""
    experiment = request.evaluated
    inputs = load_run_inputs(experiment.with_options(dtype="float32"))
    if request.evaluation is not None:
        training = read_examples(experiment, inputs.model, inputs.task, request.data, inputs.processor)
    else:
        held_out = experiment.evaluation_samples or max(1, min(len(inputs.examples) // HELD_OUT_PART, MAX_HELD_OUT))
        if held_out >= len(inputs.examples):
            raise DataError(
                f"{request.data} has {counted(len(inputs.examples), 'row')}, and {held_out} for evaluation leave none "
                "to train on; name other data with --eval-data, or use fewer --evaluation-samples."
            )
        experiment = experiment.with_options(evaluation_samples=held_out, calibration_samples=1)
        training = inputs.examples
    chosen = split_data(experiment, inputs.examples)[1]
    assert chosen is not None  # calibration and evaluation are separate
    left = separate_rows(inputs.task, training, chosen, same=request.evaluation is None)
    if not left:
        raise DataError(f"All rows of {request.data} are evaluation rows, so none is left to train on; use other data.")
    training = training if len(left) == len(training) else training.select(left)
    return _TrainInputs(inputs, experiment, training, chosen, chosen.batches(experiment.batch_size))


def _with_rate(request: TrainRequest, inputs: _TrainInputs) -> GateConfig:
    """The gate config with a learning rate that reaches the target: a short training needs a higher one than the
    paper's."""
    if request.explicit_rate:
        return request.gates
    config = request.config
    steps = -(-len(inputs.training) // (config.batch_size * config.gradient_accumulation)) * config.epochs
    return replace(request.gates, rate=reaching_rate(steps, config.learning_rate, request.gates.start))


def _settings(request: TrainRequest, inputs: _TrainInputs, gates: GateConfig) -> dict[str, Any]:
    """The settings that a resumed run must match."""
    return {
        **settings_of(inputs.experiment),
        "criterion": None,
        "gates": dataclasses.asdict(gates),
        "training": {
            **request.config.settings(),
            "data": request.data,
            "data_fingerprint": fingerprint(request.data),
            "evaluation": request.evaluation,
            "finetune_epochs": request.finetune_epochs,
            "gate_rate": gates.rate if request.explicit_rate else None,
        },
    }


def _scores(learned: LearnedGates, model: PreTrainedModel) -> torch.Tensor:
    """log alpha per member, NaN where there is none."""
    sites = sites_of(model, learned.config.kinds)
    scores = torch.full((len(sites), widest(sites)), torch.nan)
    values = learned.log_alpha.detach().float().cpu()
    for site_gates in learned.layout:
        for number, ids in enumerate(site_gates.members):
            scores[site_gates.site.index, list(ids)] = values[site_gates.first + number]
    return scores


def _rule(gates: GateConfig) -> str:
    """The option that decided how much is left."""
    if gates.l0 is not None:
        return f"l0 {gates.l0:g}"
    name = next(name for name in ("keep", "keep_parameters", "keep_flops") if getattr(gates, name) is not None)
    return f"{name} {getattr(gates, name):g}"
