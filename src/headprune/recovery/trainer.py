"""One training from beginning to end, going on where an earlier process was stopped."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, TrainerState, TrainingArguments

from headprune import distributed
from headprune.data import Examples
from headprune.errors import TrainingError
from headprune.extras import need
from headprune.gates.callback import GateCallback
from headprune.hooks.gates import InstalledGates
from headprune.hooks.outputs import evaluating
from headprune.measure.metrics import MetricFunction, choose_metric
from headprune.recovery import checkpoints
from headprune.recovery.config import TrainConfig
from headprune.recovery.engine import RecoveryTrainer, Teacher
from headprune.recovery.lora import adapted
from headprune.recovery.pace import Evaluated, Pace, Plan, evaluations
from headprune.recovery.rows import Collator, as_examples, rows_digest, split
from headprune.tasks import Task, task_of
from headprune.tasks.checks import warn_of_precision

LOGGED = 500  # points of the curve of losses
RECORDERS = "_output_capturing_hooks_installed"  # transformers' mark of a model with hooks for hidden states


@dataclass(frozen=True)
class Fitted:
    """What came of a training. The model is at `best_step`: 0 is the model as it was given."""

    steps: int
    best_step: int
    seconds: float
    samples: int  # that were trained on
    metric: str | None = None  # what the best model was chosen by
    stopped_early: bool = False
    resumed_from: int | None = None
    history: list[dict[str, float]] = field(default_factory=list)  # losses over steps
    evaluations: list[Evaluated] = field(default_factory=list)


def fit(
    model: PreTrainedModel,
    train_rows: Any,
    *,
    task: Task,
    config: TrainConfig,
    folder: str | Path,
    teacher: nn.Module | None = None,
    validation: Any = None,
    callbacks: Sequence[TrainerCallback] = (),
    metric: str | MetricFunction | None = None,
) -> Fitted:
    """Train a model in place, and leave it at its best evaluation, or at the end where there is none.

    `train_rows` and `validation` are examples, batches, or data sets of rows. Without `validation` a share of the rows
    is held out where the config asks for several evaluations. `folder` holds checkpoints, from which the same call goes
    on, to the same weights. `callbacks` go to transformers' Trainer.
    """
    need_training(config)
    if teacher is model:
        raise TrainingError("The model cannot be its own teacher; give a copy that was made before it was pruned.")
    _refuse_gates_alone(model, config, callbacks)
    warn_of_precision(model)
    teaches = teacher is not None and (config.distill > 0 or config.hidden > 0)
    rows = as_examples(train_rows, model)
    held = None if validation is None else as_examples(validation, model)
    if held is None and config.chooses:
        rows, held = split(rows, config.validation, config.seed)
    refuse_nothing_to_learn(task, rows, teaches)
    about = {
        **config.settings(),
        "samples": len(rows),
        "data": rows_digest(rows.rows),
        "validation data": None if held is None else rows_digest(held.rows),
        "teacher": checkpoints.weights_hash(teacher) if teaches and teacher is not None else None,
        "metric": getattr(metric, "__name__", metric),
        "model": checkpoints.weights_hash(model),
    }
    with _as_before(model, config.seed), _without_recorders(model, teacher), adapted(model, config.lora) as trained:
        args = _arguments(model, config, Path(folder))
        plan = Plan.of(config, -(-len(rows) // config.batch_size), held is not None)
        args.logging_steps = max(1, plan.total // LOGGED)
        trainer = RecoveryTrainer(
            task=task,
            config=config,
            teacher=Teacher(teacher, task_of(teacher, task.same)) if teacher is not None and teaches else None,
            hidden=config.hidden > 0 and _gives_states(model),
            model=trained,
            args=args,
            train_dataset=rows.rows,
            data_collator=Collator(rows.padding),
            callbacks=list(callbacks),
        )
        trainer.remove_callback(PrinterCallback)
        # What gates add to a log is there for whoever logs it.
        trainer.callback_handler.callbacks.sort(key=lambda callback: not isinstance(callback, GateCallback))
        with evaluating(teacher if teacher is not None else nn.Identity()):
            return _train(trainer, plan, held, about, metric)


def _train(
    trainer: RecoveryTrainer,
    plan: Plan,
    held: Examples | None,
    about: Mapping[str, Any],
    metric: str | MetricFunction | None,
) -> Fitted:
    config, folder = trainer.config, Path(trainer.args.output_dir)
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise TrainingError("Every process trains the whole model here; leave FSDP and DeepSpeed out of the launch.")
    if trainer.teacher is not None:
        trainer.teacher.model.to(trainer.args.device)

    def begin() -> None:
        checkpoints.claim(folder, about)
        checkpoints.drop_unfinished(folder)

    distributed.on_main(begin)
    if held is not None:
        _prepare_choice(trainer, held.batches(config.batch_size), metric)
        if trainer.is_world_process_zero():
            checkpoints.write_state(trainer.model, folder / checkpoints.START)
    trainer.add_callback(Pace(plan, config.patience, trainer.metric, trainer.start))
    last = checkpoints.last_whole(folder)
    said = {} if last is None else checkpoints.whole(last) or {}
    trainer.before = float(said.get("seconds", 0.0))
    if last is not None and said.get("stopped"):
        trainer.state = TrainerState.load_from_json(str(last / "trainer_state.json"))
        checkpoints.read_state(trainer.model, last / checkpoints.WEIGHTS)
    else:
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    best, steps = trainer.best_step, trainer.state.global_step
    if best != steps:
        chosen = checkpoints.START if best == 0 else f"{checkpoints.PREFIX}{best}/{checkpoints.WEIGHTS}"
        checkpoints.read_state(trainer.model, folder / chosen)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)  # from mixed precision
    trainer.accelerator.free_memory()
    return Fitted(
        steps=steps,
        best_step=best,
        seconds=trainer.seconds,
        samples=int(about["samples"]),
        metric=None if trainer.metric is None else trainer.metric.name,
        stopped_early=steps < plan.total,
        resumed_from=None if last is None else int(last.name.removeprefix(checkpoints.PREFIX)),
        history=[_losses(entry) for entry in trainer.state.log_history if "loss" in entry],
        evaluations=[] if trainer.metric is None else evaluations(trainer.state.log_history, trainer.start),
    )


def _prepare_choice(
    trainer: RecoveryTrainer, batches: Sequence[Mapping[str, Any]], metric: str | MetricFunction | None
) -> None:
    """What evaluations are compared by: the metric, what the dense model gives, and the model as it was given."""
    trainer.validation = batches
    teacher = trainer.teacher
    if teacher is not None:
        trainer.reference = trainer.measure(teacher.model, teacher.task)
    start = trainer.measure(trainer.model, trainer.task)
    trainer.metric = choose_metric(metric, start)
    if trainer.metric.name == "fidelity" and teacher is None:
        raise TrainingError("Fidelity is to the dense model, and none is given; pass it as teacher, or validation=0.")
    trainer.start = Evaluated(0, float(trainer.metric.of(start, trainer.reference).value), start.loss)


def _refuse_gates_alone(model: nn.Module, config: TrainConfig, callbacks: Sequence[TrainerCallback]) -> None:
    """Gates need to be told of steps, and adapters freeze them."""
    watched = any(isinstance(callback, GateCallback) for callback in callbacks)
    if watched and config.lora:
        raise TrainingError("Gates learn with all weights here; leave LoRA out, or put peft's on before the gates.")
    if not watched and any(isinstance(module, InstalledGates) for module in model.modules()):
        raise TrainingError(
            "This model has learned gates on it; end them with gates.remove(), or train them with a GateCallback."
        )


def refuse_nothing_to_learn(task: Task, rows: Examples, teaches: bool) -> None:
    if not teaches and task.counts(Collator(rows.padding)([rows.rows[0]])) is None:
        raise TrainingError(
            f"There is nothing to learn from: the training data has no labels for the task {task.name!r} and no dense "
            "model teaches; give either."
        )


def need_training(config: TrainConfig) -> None:
    """Refuse early what a training would be refused for later."""
    need(("accelerate",), "train", "Training needs")
    if config.lora:
        need(("peft",), "lora", "LoRA needs")
    if config.report_to is not None:
        from transformers.integrations import get_available_reporting_integrations

        there = get_available_reporting_integrations()
        if config.report_to not in there:
            listed = f"there are: {', '.join(there)}" if there else "none is installed"
            raise TrainingError(f"Losses cannot be logged to {config.report_to!r} here; {listed}.")


def _arguments(model: PreTrainedModel, config: TrainConfig, folder: Path) -> TrainingArguments:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TrainingError("All weights of the model are frozen; call model.requires_grad_(True) first.")
    args = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=config.epochs,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup,  # below 1, a share
        weight_decay=config.weight_decay,
        seed=config.seed,
        eval_strategy="no",  # Pace says when
        save_strategy="no",
        report_to=config.report_to or "none",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=model.device.type == "cpu",
        dataloader_pin_memory=model.device.type != "cpu",
    )
    args._n_gpu = min(args.n_gpu, 1)  # one device per process: accelerate launch is the way to several
    return args


def _gives_states(model: nn.Module) -> bool:
    taken = inspect.signature(model.forward).parameters
    return "output_hidden_states" in taken or any(p.kind is p.VAR_KEYWORD for p in taken.values())


def _losses(entry: Mapping[str, Any]) -> dict[str, float]:
    """A line of the Trainer's history as ours."""
    names = ("step", "epoch", "loss", "task_loss", "logits_loss", "hidden_loss", "learning_rate")
    return {name: entry[name] for name in names if name in entry}


@contextmanager
def _as_before(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Training changes more than weights: modes, a switch of the config, and the state of random numbers."""
    cached = getattr(model.config, "use_cache", None)
    modes = [(module, module.training) for module in model.modules()]
    python, array = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # LoRA's matrices are drawn before the Trainer sets its seed
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)
        for module, mode in modes:
            module.training = mode
        if cached is None:
            vars(model.config).pop("use_cache", None)
        else:
            model.config.use_cache = cached
        for parameter in model.parameters():
            parameter.grad = None


@contextmanager
def _without_recorders(*models: nn.Module | None) -> Iterator[None]:
    """transformers records hidden states with hooks that it leaves on a model; those that come in the block go."""
    modules = [module for model in models if model is not None for module in model.modules()]
    there = {id(module) for module in modules if hasattr(module, RECORDERS)}
    try:
        yield
    finally:
        for module in modules:
            if id(module) not in there:
                vars(module).pop(RECORDERS, None)
            for key, hook in list(module._forward_hooks.items()):
                if not there and getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
                    module._forward_hooks.pop(key)
