"""transformers' Trainer with losses per sample, distillation, metrics on held-out rows, checkpoints of pruned models.

Public hooks of the Trainer do most of it: `compute_loss`, `get_batch_samples`, `get_train_dataloader`, `evaluate`,
`save_model`, `log` and callbacks. The one private method is `_load_from_checkpoint`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from headprune.errors import NonFiniteError, TrainingError
from headprune.hooks.gates import InstalledGates
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import Metric
from headprune.measure.predictions import Predictions
from headprune.tasks import Task, batch_size
from headprune.training import checkpoints
from headprune.training.config import TrainConfig
from headprune.training.losses import distillation, hidden_error
from headprune.training.samplers import BatchShares, SimilarLengthSampler, row_lengths
from headprune.training.schedule import LOSS, VALUE, Evaluation, all_evaluations, best_evaluation


class Teacher:
    """The dense model. It is not a submodule, so that it is neither trained nor saved."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        self.model, self.task = model, task

    def __call__(self, batch: Mapping[str, Any], **options: Any) -> Any:
        with torch.no_grad():
            return self.model(**self.task.inputs(batch), **options)


def disable_dropout(model: nn.Module) -> None:
    """Put the model into evaluation mode, which has gradients as well, but for gates that learn, which draw samples."""
    model.eval()
    for module in model.modules():
        if isinstance(module, InstalledGates):
            module.train()


class RecoveryTrainer(Trainer):
    """Losses are sums over samples, divided by the samples of all batches of a step on all processes: accumulated
    gradients are those of one large batch."""

    control: Any
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        *,
        task: Task,
        config: TrainConfig,
        teacher: Teacher | None = None,
        hidden: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.task, self.config, self.teacher = task, config, teacher
        self.hidden = hidden and teacher is not None
        self.loss_is_scaled_for_ga = self.model_accepts_loss_kwargs = True
        self.validation: Sequence[Mapping[str, Any]] = ()
        self.metric: Metric | None = None
        self.reference: Predictions | None = None
        self.start: Evaluation | None = None  # before training
        self.earlier_seconds = 0.0  # of processes that were killed
        self.started = time.perf_counter()
        self.saving = False  # a checkpoint is being written
        lengths = row_lengths(self.train_dataset) or [1] * len(self.train_dataset)
        self.order = SimilarLengthSampler(lengths, config.batch_size * config.gradient_accumulation, self.args.seed)
        self._loss_sums: dict[str, torch.Tensor] = {}  # since the last log
        self._first_step = 0  # of these sums

    # --- losses ---

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list, Any]:
        """The batches of a step, and their counts together: samples, then the terms of each part of the task's loss."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        if not batches:
            return batches, None
        total: Any = sum(self._counts(batch) for batch in batches)
        return batches, self.accelerator.reduce(total.float().to(device), "sum").clamp_min(1)

    def _counts(self, batch: Mapping[str, Any]) -> torch.Tensor:
        counts = self.task.counts(batch)
        return torch.cat([torch.tensor([batch_size(batch)]), *([] if counts is None else [counts.cpu()])])

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        task, counts = self.task, num_items_in_batch
        batch = task.prepare(inputs, self.args.device)
        options = {"output_hidden_states": True} if self.hidden else {}
        if not self.config.dropout:
            disable_dropout(model)
        output = model(**task.inputs(batch), **options)
        logits = task.logits(output)
        losses: dict[str, torch.Tensor] = {}
        if len(counts) > 1:
            targets = task.targets(batch, logits)
            assert targets is not None
            losses["task"] = (task.parts(logits, targets).sums.sum(0) / counts[1:]).mean()
        if self.teacher is not None:
            dense = self.teacher(batch, **options)
            if self.config.distill:
                teacher_logits = self.teacher.task.logits(dense)
                divergences = distillation(task, logits, teacher_logits, batch, self.config.temperature)
                losses["logits"] = self.config.distill * divergences.sum() / counts[0]
            errors = hidden_error(task, output, dense, batch) if self.hidden else None
            if errors is not None:
                losses["hidden"] = self.config.hidden * errors.sum() / counts[0]
        if not losses:
            raise TrainingError("The models share no hidden states to compare; give labels, or a distill above 0.")
        # Gradients of processes are averaged, and these losses are parts of one sum.
        losses = {name: value * self.accelerator.num_processes for name, value in losses.items()}
        loss = torch.stack(list(losses.values())).sum()
        if not torch.isfinite(loss):
            raise NonFiniteError(
                f"The loss is NaN or Inf at step {self.state.global_step + 1} of training; take a lower learning rate."
            )
        if not self._loss_sums:
            self._first_step = self.state.global_step
        for name, value in losses.items():
            self._loss_sums[name] = self._loss_sums.get(name, 0) + value.detach()
        return (loss, output) if return_outputs else loss

    def get_train_dataloader(self) -> Any:
        """Each process gets its share of every batch, in the order of one process."""
        accelerator = self.accelerator
        shares = BatchShares(self.order, self.config.batch_size, accelerator.num_processes, accelerator.process_index)
        return DataLoader(
            self.train_dataset,
            batch_sampler=shares,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the parts of the loss beside it."""
        if "loss" in logs and self._loss_sums:
            steps = max(1, self.state.global_step - self._first_step)
            means = self.accelerator.reduce(torch.stack(list(self._loss_sums.values())), "mean") / steps
            parts = zip(self._loss_sums, means, strict=True)
            logs = {**logs, **{f"{name}_loss": float(value) for name, value in parts}}
            self._loss_sums = {}
        super().log(logs, start_time)

    # --- evaluation ---

    def measure(self, model: nn.Module, task: Task) -> Predictions:
        """The predictions on the validation batches, which the processes share."""
        return Evaluator(self.validation, task, cache_bytes=0)(model, ())

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        if self.metric is None:
            return {}
        predictions = self.measure(self.model, self.task)
        metrics = {VALUE: float(self.metric.of(predictions, self.reference).value)}
        if predictions.loss is not None:
            metrics[LOSS] = predictions.loss
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    # --- checkpoints ---

    @property
    def best_step(self) -> int:
        """The step with the best evaluation, or the last one where there are none."""
        evaluations = all_evaluations(self.state.log_history, self.start)
        if self.metric is None or not evaluations:
            return self.state.global_step
        return best_evaluation(evaluations, self.metric).step

    @property
    def seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.started

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the trained tensors by their names in the model: a pruned model cannot be built from its config."""
        self.saving = True
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            checkpoints.write_state(self.model, folder / checkpoints.WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The one private method that has to be replaced: it reads no files but those of `save_pretrained`, and
        the public ways to load weights all end here."""
        checkpoints.read_state(self.model, Path(resume_from_checkpoint) / checkpoints.WEIGHTS)


class ResumableRun(TrainerCallback):
    """What makes a training resumable: the order of rows belongs to the epoch, and a checkpoint counts once all
    processes have written their files. Of all checkpoints the last and the best are kept."""

    def __init__(self, trainer: RecoveryTrainer) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.order.epoch = int(state.epoch or 0)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer, folder, step = self.trainer, Path(args.output_dir), state.global_step
        trainer.accelerator.wait_for_everyone()
        if state.is_world_process_zero:
            about = {"stopped": control.should_training_stop, "seconds": trainer.seconds}
            checkpoints.mark_whole(folder / f"{checkpoints.PREFIX}{step}", about)
            checkpoints.tidy(folder, {step, trainer.best_step})
        trainer.accelerator.wait_for_everyone()
        trainer.saving = False
