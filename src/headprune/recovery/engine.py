"""transformers' Trainer with the losses, the evaluation and the checkpoints of this library."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError
from torch import nn
from transformers import Trainer
from transformers.trainer_pt_utils import safe_globals

from headprune.errors import NonFiniteError, TrainingError
from headprune.hooks.gates import InstalledGates
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import Metric
from headprune.measure.quality import Quality
from headprune.recovery import checkpoints
from headprune.recovery.config import TrainConfig
from headprune.recovery.losses import distillation, hidden_error
from headprune.recovery.order import Pieces, Shared, SimilarLengths, lengths_of
from headprune.recovery.pace import LOSS, VALUE, Evaluated, best_of, evaluations
from headprune.tasks import Task, batch_size

STATE = "rng_state.pth"  # of random numbers, in a checkpoint of one process


class Teacher:
    """The dense model, which only looks on: it is no part of what is trained, saved or moved about."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        self.model, self.task = model, task

    def __call__(self, batch: Mapping[str, Any], **asked: Any) -> Any:
        with torch.no_grad():
            return self.model(**self.task.inputs(batch), **asked)


def without_chance(model: nn.Module) -> None:
    """A model in evaluation mode has gradients as well, and draws nothing; but for gates that learn, which have to."""
    model.eval()
    for module in model.modules():
        if isinstance(module, InstalledGates):
            module.train()


class RecoveryTrainer(Trainer):
    """Losses are sums divided by what all batches of a step count together, on all processes: accumulated gradients
    are those of one large batch."""

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
        self.reference: Quality | None = None
        self.start: Evaluated | None = None  # the model as it was given
        self.before = 0.0  # seconds of earlier processes
        self.started = time.perf_counter()
        self._seen: dict[str, torch.Tensor] = {}
        self._logged_at = 0

    # --- losses ---

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list, Any]:
        """The batches of a step, and what they count together: samples, then the parts of the task's loss."""
        batches = [batch for _, batch in zip(range(num_batches), epoch_iterator, strict=False)]
        items: Any = None
        for batch in batches:
            counts = self.task.counts(batch)
            own = [torch.tensor([batch_size(batch)]), *([] if counts is None else [counts.cpu()])]
            items = torch.cat(own) if items is None else items + torch.cat(own)
        if items is not None:
            items = self.accelerator.reduce(items.float().to(device), "sum").clamp_min(1)
        return batches, items

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        task, items = self.task, num_items_in_batch
        batch = task.prepare(inputs, self.args.device)
        asked = {"output_hidden_states": True} if self.hidden else {}
        if not self.config.dropout:
            without_chance(model)
        output = model(**task.inputs(batch), **asked)
        logits = task.logits(output)
        losses: dict[str, torch.Tensor] = {}
        if len(items) > 1:
            targets = task.targets(batch, logits)
            assert targets is not None
            losses["task"] = (task.parts(logits, targets).sums.sum(0) / items[1:]).mean()
        if self.teacher is not None:
            dense = self.teacher(batch, **asked)
            if self.config.distill:
                told = distillation(task, logits, self.teacher.task.logits(dense), batch, self.config.temperature)
                losses["logits"] = self.config.distill * told.sum() / items[0]
            apart = hidden_error(task, output, dense, batch) if self.hidden else None
            if apart is not None:
                losses["hidden"] = self.config.hidden * apart.sum() / items[0]
        if not losses:
            raise TrainingError("The models share no hidden states to compare; give labels, or a distill above 0.")
        # Gradients of processes are averaged, and these losses are parts of one sum.
        losses = {name: value * self.accelerator.num_processes for name, value in losses.items()}
        loss = torch.stack(list(losses.values())).sum()
        if not torch.isfinite(loss):
            raise NonFiniteError(
                f"The loss is NaN or Inf at step {self.state.global_step + 1} of training; take a lower learning rate."
            )
        for name, value in losses.items():
            self._seen[name] = self._seen.get(name, 0) + value.detach()
        return (loss, output) if return_outputs else loss

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        together = self.config.batch_size * self.config.gradient_accumulation
        lengths = lengths_of(self.train_dataset) or [1] * len(self.train_dataset)
        return SimilarLengths(lengths, together, self.args.seed)

    def get_train_dataloader(self) -> Any:
        """Of several processes, each gets its piece of every batch, in the order of one process."""
        processes, own = self.accelerator.num_processes, self.accelerator.process_index
        if processes == 1:
            return super().get_train_dataloader()
        pieces = Pieces(self._get_train_sampler(), self.config.batch_size, processes, own)
        return Shared(self.train_dataset, batch_sampler=pieces, collate_fn=self.data_collator)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """The parts of the loss stand beside it."""
        if "loss" in logs and self._seen:
            steps = max(1, self.state.global_step - self._logged_at)
            means = self.accelerator.reduce(torch.stack(list(self._seen.values())), "mean") / steps
            logs = {**logs, **{f"{name}_loss": float(value) for name, value in zip(self._seen, means, strict=True)}}
            self._seen, self._logged_at = {}, self.state.global_step
        super().log(logs, start_time)

    # --- evaluation ---

    def measure(self, model: nn.Module, task: Task) -> Quality:
        """Over the validation batches, shared among processes."""
        return Evaluator(self.validation, task, cache_bytes=0)(model, ())

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        if self.metric is None:
            return {}
        quality = self.measure(self.model, self.task)
        found = {VALUE: float(self.metric.of(quality, self.reference).value)}
        if quality.loss is not None:
            found[LOSS] = quality.loss
        self.log(found)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
        return found

    # --- checkpoints ---

    @property
    def best_step(self) -> int:
        """The step with the best evaluation, or the last one where there are none."""
        found = [] if self.metric is None else evaluations(self.state.log_history, self.start)
        return best_of(found, self.metric).step if self.metric is not None and found else self.state.global_step

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.started

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder, step = Path(self.args.output_dir), self.state.global_step
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                about = {"stopped": self.control.should_training_stop, "seconds": self.seconds}
                checkpoints.mark_whole(folder / f"{checkpoints.PREFIX}{step}", about)
                checkpoints.tidy(folder, {step, self.best_step})
        except (OSError, SafetensorError, RuntimeError) as error:  # torch.save has a RuntimeError for a full disk
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
            raise TrainingError(
                f"Cannot write a checkpoint to {folder}: {reason}; make room and start the same training again, which "
                "goes on from the last whole one."
            ) from error
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """What is trained, by the names that it has in the model: a pruned model is not built from its config."""
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        checkpoints.write_state(self.model, folder / checkpoints.WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        checkpoints.read_state(self.model, Path(resume_from_checkpoint) / checkpoints.WEIGHTS)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Processes that draw the same have the same state: where there were more or fewer of them, the first one's."""
        folder = Path(checkpoint or "")
        own = f"rng_state_{self.args.process_index}.pth" if self.args.world_size > 1 else STATE
        if checkpoint is None or (folder / own).is_file():
            super()._load_rng_state(checkpoint)
            return
        known = next((folder / name for name in (STATE, "rng_state_0.pth") if (folder / name).is_file()), None)
        if known is not None:
            with safe_globals():
                state = torch.load(known, weights_only=True)
            random.setstate(state["python"])
            numpy.random.set_state(state["numpy"])
            torch.random.set_rng_state(state["cpu"])

    def _init_training_state(self, *args: Any, **options: Any) -> Any:
        found = super()._init_training_state(*args, **options)
        self._logged_at = self.state.global_step
        return found
