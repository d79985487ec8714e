"""Learned gates for transformers' Trainer: train as usual, with this callback."""

from __future__ import annotations

from typing import Any

import torch
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from headprune.errors import GateError
from headprune.gates.config import GateConfig
from headprune.gates.learned import NAME, LearnedGates


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

    @property
    def gates(self) -> LearnedGates:
        if self._gates is None:
            raise GateError("The gates are made when a Trainer is; give this callback to one first.")
        return self._gates

    # --- what the Trainer calls ---

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._gates is None:
            self._gates = LearnedGates(kwargs["model"], self.config, **self.options)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._gates is None:  # a Trainer that restores its callbacks makes new ones, when the gates are there
            self._gates = next(module for name, module in _modules(kwargs["model"]) if name.endswith(NAME))
        self.gates.total = state.max_steps
        self.gates.observing = False
        if state.global_step:
            self._restore(state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.gates.draw()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The gradient of what gates cost, from what every process knows after theirs were added up."""
        if self.gates.bias.grad is not None:
            self.gates.learn_price(self.gates.bias.grad)
        self.gates.loss().backward()
        self._before = self.gates.bias.detach().clone()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Gates have a learning rate of their own. The groups of the Trainer's optimizer are made before a callback can
        see them, so the step that was taken is made longer, which is the same."""
        assert self._before is not None
        with torch.no_grad():
            bias = self.gates.bias
            bias.copy_(self._before + self.gates.config.rate * (bias - self._before))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        said = {"task_loss": logs["loss"], **self.gates.report()}
        logs.update(said)
        if state.log_history:  # which the Trainer has written already
            state.log_history[-1].update(said)

    # --- what a checkpoint keeps ---

    def state(self) -> dict[str, Any]:
        """For trainer_state.json: an adapter's checkpoint has the weights of the adapter alone."""
        kept = {}
        if self._gates is not None:
            kept = {name: value.tolist() for name, value in self._gates.state_dict().items()}
        return {"args": {}, "attributes": {"saved": kept}}

    def _restore(self, state: TrainerState) -> None:
        entry: Any = state.stateful_callbacks.get(type(self).__name__) or {}
        entry = entry[0] if isinstance(entry, list) else entry
        saved = entry.get("attributes", {}).get("saved")
        if not saved:
            raise GateError("The checkpoint was written without these gates; resume from one that has them.")
        own = self.gates.state_dict()
        if {name: list(value.shape) for name, value in own.items()} != {
            name: list(torch.tensor(value).shape) for name, value in saved.items()
        }:
            raise GateError("The gates of the checkpoint are others than these; resume with the options they had.")
        self.gates.load_state_dict({name: torch.tensor(saved[name], dtype=own[name].dtype) for name in own})


def _modules(model: Any) -> Any:
    return model.named_modules()
