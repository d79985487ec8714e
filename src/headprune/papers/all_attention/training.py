"""The training loop, with gates or without, and the loss on text that was not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headprune.gates.learned import LearnedGates
from headprune.papers.all_attention.plan import Settings
from headprune.papers.all_attention.text import Text

BATCH = 64  # windows that are measured at once
Watch = Callable[[float], None]  # told the loss of every step


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
    watch: Watch | None = None,
) -> None:
    """Train for so many steps. With `done` and `total` they are a part of a longer training, whose learning rate goes
    on where it was."""
    torch.manual_seed(seed)  # for the noise of gates
    groups: list[dict[str, Any]]
    groups = gates.parameter_groups(rate) if gates is not None else [{"params": list(model.parameters()), "lr": rate}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=settings.weight_decay)
    whole = steps if total is None else total
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share(done + step, whole, settings.rise))
    model.train()
    for ids in text.batches(steps, settings.batch, settings.context, seed):
        loss = model(input_ids=ids, labels=ids).loss
        (loss if gates is None else loss + gates.loss()).backward()
        # Of the model's weights alone: what gates cost is no reason to take a smaller step with the weights.
        nn.utils.clip_grad_norm_(groups[0]["params"], settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if watch is not None:
            watch(float(loss.detach()))
    model.eval()


def share(step: int, total: int, rise: float) -> float:
    """Of the highest learning rate: a straight rise, then half a cosine down to a twentieth."""
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
