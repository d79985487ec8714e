"""The training loop, with or without gates, and the validation loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headprune.papers.all_attention.plan import Settings
from headprune.papers.all_attention.text import Text
from headprune.training.learned_gates import LearnedGates

BATCH = 64  # windows of a validation batch
OnLoss = Callable[[float], None]  # called with the loss of every step


def train(
    model: nn.Module,
    text: Text,
    settings: Settings,
    *,
    steps: int,
    rate: float,
    seed: int,
    gates: LearnedGates | None = None,
    done: int = 0,
    total: int | None = None,
    on_loss: OnLoss | None = None,
) -> None:
    """Train for `steps` steps. With `done` and `total` they are part of a longer training, whose learning rate schedule
    continues after `done` steps."""
    windows = text.batches(steps, settings.batch, settings.context, seed)
    batches = ({"input_ids": ids, "labels": ids} for ids in windows)
    total = steps if total is None else total
    optimizing = Optimizing(rate, done, total, settings.rise, settings.weight_decay, settings.clip)
    train_on(model, batches, optimizing, seed=seed, gates=gates, on_loss=on_loss)


@dataclass(frozen=True)
class Optimizing:
    """How weights are trained: the peak of the learning rate, and which steps of how many these are."""

    rate: float
    done: int
    total: int
    rise: float = 0.1  # share of all steps for warm-up
    weight_decay: float = 0.01
    clip: float = 1.0


def train_on(
    model: nn.Module,
    batches: Iterable[Mapping[str, torch.Tensor]],
    how: Optimizing,
    *,
    seed: int,
    gates: LearnedGates | None = None,
    on_loss: OnLoss | None = None,
) -> None:
    """A step for each batch with AdamW."""
    torch.manual_seed(seed)  # for the random noise of gates
    groups: list[dict[str, Any]]
    groups = (
        gates.parameter_groups(how.rate)
        if gates is not None
        else [{"params": list(model.parameters()), "lr": how.rate}]
    )
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=how.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share(how.done + step, how.total, how.rise))
    model.train()
    for batch in batches:
        loss = model(**batch).loss
        (loss if gates is None else loss + gates.loss()).backward()
        # Only the weights of the model: the loss of gates must not reduce their steps.
        nn.utils.clip_grad_norm_(groups[0]["params"], how.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if on_loss is not None:
            on_loss(float(loss.detach()))
    model.eval()


def share(step: int, total: int, rise: float) -> float:
    """The learning rate as a share of its peak: linear warm-up, then cosine decay to a twentieth."""
    top = max(1.0, rise * total)
    if step < top:
        return (step + 1) / (top + 1)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, (step - top) / max(1.0, total - top))))


@torch.no_grad()
def window_losses(model: Any, text: Text, settings: Settings) -> torch.Tensor:
    """The mean loss of each window of the validation text, in nats per byte."""
    model.eval()
    losses = []
    for ids in text.windows(settings.windows, settings.context).split(BATCH):
        logits = model(input_ids=ids).logits[:, :-1]
        each = nn.functional.cross_entropy(logits.transpose(1, 2).float(), ids[:, 1:], reduction="none")
        losses.append(each.double().mean(1))
    return torch.cat(losses)


def interval(values: torch.Tensor) -> float:
    """Half the width of the 95 % interval of a mean over windows."""
    return float(1.96 * values.std() / math.sqrt(len(values)))
