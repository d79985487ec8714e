"""Learned gates for transformers' Trainer: train as usual, with this callback."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerCallback

from headprune.errors import GateError
from headprune.hooks.attach import after_accumulation
from headprune.training.gate_config import GateConfig
from headprune.training.learned_gates import NAME, LearnedGates, plain_model

STATE = "trainer_state.json"  # of a checkpoint


class GateCallback(TrainerCallback, ExportableState):
    """Installs learned gates on the model of a Trainer, and makes them learn.

        callback = headprune.GateCallback(keep=0.5)
        Trainer(model, args, train_dataset=..., callbacks=[callback]).train()
        model = callback.gates.remove(verify=batch)

    Options are the fields of `GateConfig`. What gates cost enters once per step of the optimizer, whatever the number
    of batches that it accumulates or of processes; its weight is not in the loss that the Trainer logs, which is that
    of the task. Checkpoints have the gates in them, and resuming restores them.
    """

    def __init__(self, config: GateConfig | None = None, *, gates: LearnedGates | None = None, **options: Any) -> None:
        self.config, self.options = config, options
        self._gates = gates
        self.saved: dict[str, Any] = {}
        self._before: torch.Tensor | None = None
        self._task: torch.Tensor | None = None  # gradient of the task alone, before the Trainer clips it
        self._handle: Any = None

    @property
    def gates(self) -> LearnedGates:
        if self._gates is None:
            raise GateError("The gates are made when a Trainer is; give this callback to one first.")
        return self._gates

    # --- events of the Trainer ---

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._gates is None:
            self._gates = LearnedGates(kwargs["model"], self.config, **self.options)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        installed = getattr(plain_model(kwargs["model"]), NAME, None)
        if installed is None or self._gates not in (None, installed):
            raise GateError(
                "The model that trains does not have the gates of this callback; make a new callback for every "
                "Trainer, give it as callbacks=[...] when that is made, and give that a model and no model_init."
            )
        if args.fp16:
            raise GateError("Gates learn in float32 or bfloat16, and not with the scaled gradients of fp16; use bf16.")
        self._gates = installed  # a Trainer that restores its callbacks makes new ones, when the gates are there
        self.gates.total = state.max_steps
        self.gates.observing = False
        if state.global_step:
            self._restore(state.stateful_callbacks)
        self._handle = after_accumulation(self.gates.bias, self._note_gradient)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the gradient of the gates' loss, scaled as clipping scaled the gradient of the task."""
        gates, clipped, task = self.gates, self.gates.bias.grad, self._task_gradient()
        factor = 1.0
        if clipped is not None and task is not None:
            gates.learn_price(task)
            size = float(task.norm())
            factor = float(clipped.norm()) / size if size > 0 else 1.0
        (cost,) = torch.autograd.grad(gates.loss(), gates.bias)
        gates.bias.grad = factor * cost if clipped is None else clipped + factor * cost
        self._before, self._task = gates.bias.detach().clone(), None

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Gates have a learning rate of their own. The groups of the Trainer's optimizer are made before a callback can
        see them, so the step that was taken is made longer, which is the same."""
        assert self._before is not None
        with torch.no_grad():
            bias = self.gates.bias
            bias.copy_(self._before + self.gates.config.rate * (bias - self._before))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._handle.remove()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            file = Path(state.best_model_checkpoint) / STATE
            self._restore(json.loads(file.read_text(encoding="utf-8"))["stateful_callbacks"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs:
            return
        numbers = {"task_loss": logs.get("task_loss", logs["loss"]), **self.gates.report()}
        logs.update(numbers)
        if state.log_history:  # which the Trainer has written already
            state.log_history[-1].update(numbers)

    # --- gradients ---

    def _note_gradient(self, bias: torch.Tensor) -> None:
        self._task = None if bias.grad is None else bias.grad.detach().clone()

    def _task_gradient(self) -> torch.Tensor | None:
        """The mean over processes, as the gradient of the Trainer is by now."""
        if self._task is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self._task)
            self._task /= torch.distributed.get_world_size()
        return self._task

    # --- state in a checkpoint ---

    def state(self) -> dict[str, Any]:
        """For trainer_state.json: an adapter's checkpoint has the weights of the adapter alone."""
        kept: dict[str, Any] = {}
        if self._gates is not None:
            values = {name: value.tolist() for name, value in self._gates.state_dict().items()}
            kept = {"config": dataclasses.asdict(self._gates.config), "values": values}
        return {"args": {}, "attributes": {"saved": kept}}

    def _restore(self, callbacks: Mapping[str, Any]) -> None:
        entry: Any = callbacks.get(type(self).__name__) or {}
        entry = entry[0] if isinstance(entry, list) else entry
        saved = entry.get("attributes", {}).get("saved")
        if not saved:
            raise GateError("The checkpoint was written without these gates; resume from one that has them.")
        config = dataclasses.asdict(self.gates.config)
        other = [name for name, value in config.items() if saved["config"].get(name) != value]
        if other:
            was, now = saved["config"].get(other[0]), config[other[0]]
            raise GateError(
                f"The gates of the checkpoint are others than these: {other[0]} was {was!r} and is now {now!r}; resume "
                "with the options they had."
            )
        current = self.gates.state_dict()
        if not current.keys() <= saved["values"].keys():
            raise GateError(
                "The checkpoint was written by another version of headprune; resume with that, or start anew."
            )
        values = {name: torch.tensor(saved["values"][name], dtype=value.dtype) for name, value in current.items()}
        self.gates.load_state_dict(values)
