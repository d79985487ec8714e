"""What the tests of gates in a Trainer share, in one process or in several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

import headprune
from recovery_helpers import build, labelled

QUIET = {"report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no", "use_cpu": True}
DROPLESS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def rows() -> list[dict[str, torch.Tensor]]:
    """Eight rows, of one length."""
    return [{name: value[row] for name, value in batch.items()} for batch in labelled(2) for row in range(4)]


def whole_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """The mean over all samples of a step: the Trainer does not divide the mean of a classifier's batch by the number
    of batches that it accumulates."""
    total = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def trainer_of(
    model: Any, folder: Path, callback: Any = None, *, model_init: Any = None, **options: Any
) -> tuple[Any, Any]:
    """Six steps by default, with gates under an L0 loss."""
    settings = {"max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 1e-2, **QUIET, **options}
    callback = callback or headprune.GateCallback(l0=0.1)
    args = transformers.TrainingArguments(str(folder), **settings)
    trainer = transformers.Trainer(
        model,
        args,
        train_dataset=rows(),
        callbacks=[callback],
        compute_loss_func=whole_loss,
        eval_dataset=rows(),
        model_init=model_init,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer, callback


def gates_after(folder: Path, *, batch_size: int, accumulated: int = 1, **options: Any) -> list[float]:
    """The biases after a training whose only chance is the draws of gates, one per forward pass, in float64."""
    model = build(**DROPLESS).double()
    trainer, callback = trainer_of(
        model,
        folder,
        headprune.GateCallback(keep=0.5, warmup=0.0, difference=0.1),
        max_steps=4,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulated,
        learning_rate=1e-3,
        **options,
    )
    trainer.train()
    assert int(callback.gates.taken) == 4
    actual: list[float] = callback.gates.bias.tolist()
    return actual
