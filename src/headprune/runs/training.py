"""Learned gates as the command line trains them: a run directory as `prune` writes it, then a recovery beside it.

run.json, steps.jsonl, model/, report.html    as for every run; step 1 is the removal of what was closed
gates.jsonl                                   how open each gate was, over the steps of the training
training/                                     checkpoints, as long as it goes on
finetuned/                                    the fine-tuning that follows
"""

from __future__ import annotations

import copy
import dataclasses
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback

from headprune import distributed
from headprune.data import Examples
from headprune.errors import DataError, TrainingError
from headprune.gates.callback import GateCallback
from headprune.gates.config import GateConfig, reaching_rate
from headprune.gates.journal import GateJournal
from headprune.gates.learned import LearnedGates
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import Metric, choose_metric
from headprune.measure.quality import Quality
from headprune.measure.savings import savings
from headprune.measure.trajectory import Step
from headprune.recovery.config import TrainConfig
from headprune.recovery.pace import Teller
from headprune.recovery.trainer import fit, need_training, refuse_nothing_to_learn
from headprune.report.exports import forget_exports
from headprune.runs.experiment import drawn, fingerprint, in_precision_of, publish_run, record_of, settings_of
from headprune.runs.finetune import run_finetune
from headprune.runs.journal import Run, opened
from headprune.runs.request import Request, places_apart
from headprune.runs.subject import Subject, load_subject, read_examples
from headprune.search.config import Experiment
from headprune.search.pruner import PruneResult
from headprune.search.schedules.schedule import Removal
from headprune.search.step import describe
from headprune.store.checkpoint import save
from headprune.store.places import model_folder
from headprune.units import kept_mask, sites_of, widest

TENTH = 10  # one row of so many evaluates, where no other data does
MOST = 2000  # rows that are held back for it at most

OnStep = Callable[[Step], None]
Tell = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, on what, and for how long. Without `evaluation` a part of the data is held back for it."""

    experiment: Experiment  # the model, how data is read, and the metric
    gates: GateConfig
    config: TrainConfig = field(default_factory=TrainConfig)
    evaluation: str | None = None
    finetune_epochs: float = 1.0
    own_rate: bool = False  # whether the learning rate of gates was asked for

    def __post_init__(self) -> None:
        if not 0 <= self.finetune_epochs < math.inf:
            raise TrainingError(f"finetune_epochs must be a number of at least 0, but it is {self.finetune_epochs:g}.")
        if self.config.lora:
            raise TrainingError("Gates learn with all weights; LoRA goes with `headprune finetune`, or in Python.")

    @property
    def data(self) -> str:
        """What is trained on."""
        return self.experiment.data

    @property
    def evaluated(self) -> Experiment:
        """The experiment as a run of `prune` would have it: its data evaluates."""
        if self.evaluation is None:
            return self.experiment.with_options(repair="none")
        return self.experiment.with_options(data=self.evaluation, calibration=self.data, repair="none")


@dataclass
class _Loaded:
    """What a training works with."""

    subject: Subject
    experiment: Experiment
    training: Examples
    held_out: Examples
    evaluation: Sequence[Mapping[str, Any]]  # in batches

    def quality(self, model: PreTrainedModel) -> Quality:
        return Evaluator(self.evaluation, self.subject.task, cache_bytes=0)(model, ())


def run_training(
    asked: Training,
    out: Path,
    *,
    overwrite: bool = False,
    on_step: OnStep | None = None,
    tell: Tell | None = None,
) -> dict[str, Any]:
    """Train gates into the run directory `out`, remove what closed, and fine-tune; goes on where an earlier process
    stopped. Returns the record of the run, with that of the fine-tuning under "recovery"."""
    need_training(asked.config)
    finetuning = replace(asked.config, epochs=asked.finetune_epochs) if asked.finetune_epochs else None
    with distributed.fail_together():
        loaded = _load(asked)
        task, config = loaded.subject.task, asked.config
        refuse_nothing_to_learn(task, loaded.training, config.distill > 0 or config.hidden > 0)
    model, dense = loaded.subject.model, copy.deepcopy(loaded.subject.model)
    reference = loaded.quality(dense)
    metric = choose_metric(asked.experiment.metric, reference)
    learned = LearnedGates(model, _with_rate(asked, loaded))
    # What could be refused has been by now: from here on the directory is written to.
    with opened(out, lambda: _settings(asked, loaded, learned.config), overwrite=overwrite) as run:
        if run is not None and overwrite and not run.steps:
            shutil.rmtree(out / "training", ignore_errors=True)
            shutil.rmtree(out / "finetuned", ignore_errors=True)
        if distributed.broadcast(run is not None and run.finished):
            for step in run.steps if run is not None and on_step is not None else ():
                on_step(step)  # type: ignore[misc]
        else:
            _learn(asked, loaded, out, run, learned, dense, (reference, metric), on_step, tell)
        record = distributed.on_main(lambda: _published(out, run))
    if finetuning is None:
        return record
    recovery = run_finetune(Request(run=out, data=asked.data, config=finetuning), tell=tell)
    return {**record, "recovery": recovery}


def _published(out: Path, run: Run | None) -> dict[str, Any]:
    assert run is not None
    publish_run(out, run.record)
    return run.record


def _learn(
    asked: Training,
    loaded: _Loaded,
    out: Path,
    run: Run | None,  # the first process's
    learned: LearnedGates,
    dense: PreTrainedModel,
    measured: tuple[Quality, Metric],
    on_step: OnStep | None,
    tell: Tell | None,
) -> None:
    model, task, kinds = loaded.subject.model, loaded.subject.task, learned.config.kinds
    reference, metric = measured
    known = distributed.broadcast(0 if run is None else len(run.steps))

    def note(removal: Removal, of: PreTrainedModel, seconds: float) -> None:
        quality = reference if of is dense else loaded.quality(of)
        if run is None:
            return
        about = len(run.steps), removal, quality, reference, metric.of(quality, reference)
        step = describe(of, sites_of(of, kinds), kinds, *about)
        run.append(step, {"seconds": seconds})
        if on_step is not None:
            on_step(step)

    if not known:
        note(Removal(), dense, 0.0)
    watching: list[TrainerCallback] = [GateCallback(gates=learned), GateJournal(learned, out)]
    fitted = fit(
        model,
        loaded.training,
        task=task,
        # The best of several evaluations would be one with more units: only the end counts.
        config=replace(asked.config, validation=0.0, patience=None),
        folder=out / "training",
        teacher=dense,
        callbacks=[*watching, *([] if tell is None else [Teller(tell)])],
    )
    learned.total = fitted.steps  # a training that an earlier process finished has not told
    said, scores = learned.report(), _scores(learned, model)
    closed = tuple(learned.closed())
    own = [float(scores[member.site, member.index]) for member in closed]
    two = task.prepare(loaded.training.select([0, 1][: len(loaded.training)]).batches(2, full=True)[0], model.device)
    learned.remove(verify=task.inputs(two))
    mean = sum(own) / len(own) if own else None
    if known < 2:  # an earlier process may have got this far
        note(Removal(closed, mean, scores), model, fitted.seconds)

    def finish() -> None:
        assert run is not None
        _finish(asked, loaded, run, model, dense, metric, {"steps": fitted.steps, **said})
        shutil.rmtree(out / "training", ignore_errors=True)

    distributed.on_main(finish)


def _finish(
    asked: Training,
    loaded: _Loaded,
    run: Run,
    model: PreTrainedModel,
    dense: PreTrainedModel,
    metric: Metric,
    said: Mapping[str, Any],
) -> None:
    source = model_folder(loaded.experiment.model)
    forget_exports(run.path)
    save(in_precision_of(source, model), run.path / "model")
    mask = kept_mask(sites_of(model, asked.gates.kinds))
    result = PruneResult(model, dense, run.steps, len(run.steps) - 1, metric, mask, _rule(asked.gates))
    folders = {"dense": source, "pruned": run.path / "model"}
    batch = loaded.held_out.longest(loaded.experiment.batch_size)
    run.finish(
        {
            "samples": {"training": len(loaded.training), "evaluation": len(loaded.held_out)},
            "task": loaded.subject.task.name,
            "result": record_of(result),
            "gates": dict(said),
            "savings": savings(dense, model, batch, folders=folders, task=loaded.subject.task),
        }
    )


def _load(asked: Training) -> _Loaded:
    """The model in full precision, which training needs, the rows that train, and those that evaluate."""
    experiment = asked.evaluated
    subject = load_subject(experiment.with_options(dtype="float32"))
    if asked.evaluation is not None:
        training = read_examples(experiment, subject.model, subject.task, asked.data, subject.processor)
    else:
        held = experiment.evaluation_samples or max(1, min(len(subject.examples) // TENTH, MOST))
        if held >= len(subject.examples):
            raise DataError(
                f"{asked.data} has {len(subject.examples)} rows, and {held} to evaluate on leave none to train on; "
                "give other data with --evaluation, or fewer --evaluation-samples."
            )
        experiment = experiment.with_options(evaluation_samples=held, calibration_samples=1)
        training = subject.examples
    chosen = drawn(experiment, subject.examples)[1]
    assert chosen is not None  # calibration is apart
    left = places_apart(subject.task, training, chosen, same=asked.evaluation is None)
    if not left:
        raise DataError(f"All rows of {asked.data} evaluate, and none is left to train on; give other data.")
    training = training if len(left) == len(training) else training.select(left)
    return _Loaded(subject, experiment, training, chosen, chosen.batches(experiment.batch_size))


def _with_rate(asked: Training, loaded: _Loaded) -> GateConfig:
    """A short training needs faster gates than the paper's."""
    if asked.own_rate:
        return asked.gates
    config = asked.config
    steps = -(-len(loaded.training) // (config.batch_size * config.gradient_accumulation)) * config.epochs
    return replace(asked.gates, rate=reaching_rate(steps, config.learning_rate, asked.gates.start))


def _settings(asked: Training, loaded: _Loaded, gates: GateConfig) -> dict[str, Any]:
    """What a resumed run must agree with."""
    return {
        **settings_of(loaded.experiment),
        "criterion": None,
        "gates": dataclasses.asdict(gates),
        "training": {
            **asked.config.settings(),
            "data": asked.data,
            "data_fingerprint": fingerprint(asked.data),
            "evaluation": asked.evaluation,
            "finetune_epochs": asked.finetune_epochs,
            "gate_rate": gates.rate if asked.own_rate else None,
        },
    }


def _scores(learned: LearnedGates, model: PreTrainedModel) -> torch.Tensor:
    """log alpha per member, NaN where there is none."""
    sites = sites_of(model, learned.config.kinds)
    scores = torch.full((len(sites), widest(sites)), torch.nan)
    values = learned.log_alpha.detach().float().cpu()
    for place in learned.places:
        for number, ids in enumerate(place.members):
            scores[place.site.index, list(ids)] = values[place.first + number]
    return scores


def _rule(gates: GateConfig) -> str:
    """What decided how much is left, in the words of the options."""
    if gates.l0 is not None:
        return f"l0 {gates.l0:g}"
    name = next(name for name in ("keep", "keep_parameters", "keep_flops") if getattr(gates, name) is not None)
    return f"{name} {getattr(gates, name):g}"
