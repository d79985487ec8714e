"""One training from beginning to end, resumed where an earlier process was stopped."""

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
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, TrainerState, TrainingArguments

from headprune import distributed
from headprune.data import Examples
from headprune.errors import TrainingError
from headprune.extras import need, need_integration
from headprune.hooks.gates import InstalledGates
from headprune.hooks.outputs import evaluating
from headprune.measure.metrics import MetricFunction, choose_metric
from headprune.tasks import Task, task_of
from headprune.tasks.checks import warn_of_precision
from headprune.training import checkpoints
from headprune.training.config import TrainConfig
from headprune.training.dataset import Collator, as_examples, rows_digest, split
from headprune.training.gate_callback import GateCallback
from headprune.training.lora import lora
from headprune.training.schedule import Evaluation, ScheduleCallback, TrainingSchedule, all_evaluations
from headprune.training.trainer import RecoveryTrainer, ResumableRun, Teacher

LOGGED = 500  # points of the curve of losses
CAPTURE_MARK = "_output_capturing_hooks_installed"  # transformers' attribute of a model with hooks for hidden states


@dataclass(frozen=True)
class FitResult:
    """The result of a training. The model is at `best_step`; 0 is the model before training."""

    steps: int
    best_step: int
    seconds: float
    samples: int  # of training
    metric: str | None = None  # that chose the best model
    stopped_early: bool = False
    resumed_from: int | None = None
    history: list[dict[str, float]] = field(default_factory=list)  # losses over steps
    evaluations: list[Evaluation] = field(default_factory=list)


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
) -> FitResult:
    """Train a model in place, and leave it at its best evaluation, or at the end where there is none.

    `train_rows` and `validation` are examples, batches, or data sets of rows. Without `validation` a share of the rows
    is held out where the config asks for several evaluations. `folder` holds checkpoints, from which the same call
    resumes, to the same weights. `callbacks` go to transformers' Trainer.
    """
    need_training(config)
    if teacher is model:
        raise TrainingError("The model cannot be its own teacher; give a copy that was made before it was pruned.")
    _refuse_gates_alone(model, config, callbacks)
    warn_of_precision(model)
    distills = teacher is not None and (config.distill > 0 or config.hidden > 0)
    rows = as_examples(train_rows, model)
    held_out = None if validation is None else as_examples(validation, model)
    if held_out is None and config.chooses:
        rows, held_out = split(rows, config.validation, config.seed)
    refuse_nothing_to_learn(task, rows, distills)
    settings = {
        **config.settings(),
        "samples": len(rows),
        "data": rows_digest(rows.rows),
        "validation data": None if held_out is None else rows_digest(held_out.rows),
        "teacher": checkpoints.weights_hash(teacher) if distills and teacher is not None else None,
        "metric": getattr(metric, "__name__", metric),
        "model": checkpoints.weights_hash(model),
    }
    with (
        _state_restored(model, config.seed),
        _capture_hooks_removed(model, teacher),
        lora(model, config.lora) as trained,
    ):
        args = _arguments(model, config, Path(folder))
        schedule = TrainingSchedule.of(config, -(-len(rows) // config.batch_size), held_out is not None)
        args.logging_steps = max(1, schedule.steps // LOGGED)
        trainer = RecoveryTrainer(
            task=task,
            config=config,
            teacher=Teacher(teacher, task_of(teacher, task.transferable_name))
            if teacher is not None and distills
            else None,
            hidden=config.hidden > 0 and _returns_hidden_states(model),
            model=trained,
            args=args,
            train_dataset=rows.rows,
            data_collator=Collator(rows.padding),
            callbacks=list(callbacks),
        )
        trainer.remove_callback(PrinterCallback)
        # Gates add their numbers to a log before other callbacks read it.
        trainer.callback_handler.callbacks.sort(key=lambda callback: not isinstance(callback, GateCallback))
        with evaluating(teacher if teacher is not None else nn.Identity()):
            return _train(trainer, schedule, held_out, settings, metric)


def _train(
    trainer: RecoveryTrainer,
    schedule: TrainingSchedule,
    held_out: Examples | None,
    settings: Mapping[str, Any],
    metric: str | MetricFunction | None,
) -> FitResult:
    config, folder = trainer.config, Path(trainer.args.output_dir)
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise TrainingError("Every process trains the whole model here; leave FSDP and DeepSpeed out of the launch.")
    if trainer.teacher is not None:
        trainer.teacher.model.to(trainer.args.device)

    def begin() -> None:
        checkpoints.claim(folder, settings)
        checkpoints.drop_unfinished(folder)

    distributed.on_main(begin)
    if held_out is not None:
        _prepare_evaluation(trainer, held_out.batches(config.batch_size), metric)
        if trainer.is_world_process_zero():
            checkpoints.write_state(trainer.model, folder / checkpoints.START)
    trainer.add_callback(ScheduleCallback(schedule, config.patience, trainer.metric, trainer.start))
    trainer.add_callback(ResumableRun(trainer))
    last = checkpoints.last_whole(folder)
    record = {} if last is None else checkpoints.whole(last) or {}
    trainer.earlier_seconds = float(record.get("seconds", 0.0))
    if last is not None and record.get("stopped"):
        trainer.state = TrainerState.load_from_json(str(last / "trainer_state.json"))
        checkpoints.read_state(trainer.model, last / checkpoints.WEIGHTS)
    else:
        if last is not None:
            distributed.on_main(lambda: checkpoints.share_random_state(last, trainer.args.world_size))
        _resume(trainer, last)
    best, steps = trainer.best_step, trainer.state.global_step
    if best != steps:
        chosen = checkpoints.START if best == 0 else f"{checkpoints.PREFIX}{best}/{checkpoints.WEIGHTS}"
        checkpoints.read_state(trainer.model, folder / chosen)
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_fp32_wrapper=False)  # from mixed precision
    trainer.accelerator.free_memory()
    return FitResult(
        steps=steps,
        best_step=best,
        seconds=trainer.seconds,
        samples=int(settings["samples"]),
        metric=None if trainer.metric is None else trainer.metric.name,
        stopped_early=steps < schedule.steps,
        resumed_from=None if last is None else int(last.name.removeprefix(checkpoints.PREFIX)),
        history=[_losses(entry) for entry in trainer.state.log_history if "loss" in entry],
        evaluations=[] if trainer.metric is None else all_evaluations(trainer.state.log_history, trainer.start),
    )


def _resume(trainer: RecoveryTrainer, last: Path | None) -> None:
    """Train to the end, from the last whole checkpoint where there is one."""
    try:
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save has a RuntimeError for a full disk
        if not trainer.saving:
            raise
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise TrainingError(
            f"Cannot write a checkpoint to {trainer.args.output_dir}: {reason}; make room and start the same training "
            "again, which goes on from the last whole one."
        ) from error


def _prepare_evaluation(
    trainer: RecoveryTrainer, batches: Sequence[Mapping[str, Any]], metric: str | MetricFunction | None
) -> None:
    """Set the metric, the dense model's predictions, and the evaluation before training."""
    trainer.validation = batches
    teacher = trainer.teacher
    if teacher is not None:
        trainer.reference = trainer.measure(teacher.model, teacher.task)
    start = trainer.measure(trainer.model, trainer.task)
    trainer.metric = choose_metric(metric, start)
    if trainer.metric.name == "fidelity" and teacher is None:
        raise TrainingError("Fidelity is to the dense model, and none is given; pass it as teacher, or validation=0.")
    trainer.start = Evaluation(0, float(trainer.metric.of(start, trainer.reference).value), start.loss)


def _refuse_gates_alone(model: nn.Module, config: TrainConfig, callbacks: Sequence[TrainerCallback]) -> None:
    """Gates learn through their callback, and adapters would freeze them."""
    watched = any(isinstance(callback, GateCallback) for callback in callbacks)
    if watched and config.lora:
        raise TrainingError("Gates learn with all weights here; leave LoRA out, or put peft's on before the gates.")
    if not watched and any(isinstance(module, InstalledGates) for module in model.modules()):
        raise TrainingError(
            "This model has learned gates on it; end them with gates.remove(), or train them with a GateCallback."
        )


def refuse_nothing_to_learn(task: Task, rows: Examples, distills: bool) -> None:
    if not distills and task.counts(Collator(rows.padding)([rows.rows[0]])) is None:
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
        need_integration(config.report_to, "Losses", TrainingError)


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
        eval_strategy="no",  # ScheduleCallback evaluates and saves
        save_strategy="no",
        report_to=config.report_to or "none",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=model.device.type == "cpu",
        dataloader_pin_memory=model.device.type != "cpu",
    )
    # One device per process, several by `accelerate launch`. The private name is the only switch that keeps a Trainer
    # from wrapping the model in DataParallel where there are several devices.
    args._n_gpu = min(args.n_gpu, 1)
    return args


def _returns_hidden_states(model: nn.Module) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return "output_hidden_states" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _losses(entry: Mapping[str, Any]) -> dict[str, float]:
    """The losses and the learning rate in an entry of the Trainer's history."""
    names = ("step", "epoch", "loss", "task_loss", "logits_loss", "hidden_loss", "learning_rate")
    return {name: entry[name] for name in names if name in entry}


@contextmanager
def _state_restored(model: PreTrainedModel, seed: int) -> Iterator[None]:
    """Restore afterwards what training changes beside weights: modes, `config.use_cache`, and random numbers."""
    use_cache = getattr(model.config, "use_cache", None)
    modes = [(module, module.training) for module in model.modules()]
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)  # LoRA's matrices are drawn before the Trainer sets its seed
            yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        for module, mode in modes:
            module.training = mode
        if use_cache is None:
            vars(model.config).pop("use_cache", None)
        else:
            model.config.use_cache = use_cache
        for parameter in model.parameters():
            parameter.grad = None


@contextmanager
def _capture_hooks_removed(*models: nn.Module | None) -> Iterator[None]:
    """Remove afterwards the hooks by which transformers captures hidden states: it leaves them on a model, and has no
    public way to take them off."""
    modules = [module for model in models if model is not None for module in model.modules()]
    hooked = {id(module) for module in modules if hasattr(module, CAPTURE_MARK)}
    try:
        yield
    finally:
        for module in modules:
            if id(module) not in hooked:
                vars(module).pop(CAPTURE_MARK, None)
            for key, hook in list(module._forward_hooks.items()):
                if not hooked and getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
                    module._forward_hooks.pop(key)
