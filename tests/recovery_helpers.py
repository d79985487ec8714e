"""What the tests of recovery share: a small pruned classifier, data it can learn, and trainings that are killed."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import headprune
from headprune.tasks import task_of
from headprune.training import checkpoints
from headprune.training.config import TrainConfig
from headprune.training.fit import FitResult, fit
from run_helpers import in_fork
from zoo import BERT, LABELS, spread, text_batch

MOMENTS = ("weights", "unmarked", "marked", "tidied")


def build(model_class: Any = transformers.BertForSequenceClassification, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = model_class(transformers.BertConfig(**{**BERT, **settings}))
    spread(model)
    return model.eval()


def pair(model_class: Any = transformers.BertForSequenceClassification, **settings: Any) -> tuple[Any, Any]:
    """A model without its first site and a head of the second, and the dense one."""
    model = build(model_class, **settings)
    dense = copy.deepcopy(model)
    headprune.remove(model, [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2)])
    return model, dense


def labelled(count: int = 4, seed: int = 0, size: int = 4) -> list[dict[str, torch.Tensor]]:
    """Texts whose label is that of their second token, which can be learned."""
    batches = [text_batch(seed + number, size=size) for number in range(count)]
    return [{**batch, "labels": batch["input_ids"][:, 1] % LABELS} for batch in batches]


def unlabelled(count: int = 4, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    return [{k: v for k, v in batch.items() if k != "labels"} for batch in labelled(count, seed)]


def train(model: Any, data: Any, folder: Path, *, teacher: Any = None, **options: Any) -> FitResult:
    own = {name: options.pop(name) for name in ("validation", "callbacks", "metric") if name in options}
    config = TrainConfig(**{"batch_size": 4, "learning_rate": 1e-3, **options})
    return fit(model, data, task=task_of(model), config=config, folder=folder, teacher=teacher, **own)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work: Callable[[], Any], moment: str, save: int) -> None:
    """Do the work in a fork that is killed while it writes its checkpoint of this number."""
    assert in_fork(lambda: _dying(work, moment, save)) == -signal.SIGKILL


def _dying(work: Callable[[], Any], moment: str, save: int) -> None:
    seen = 0
    write, mark, tidy = checkpoints.write_state, checkpoints.mark_whole, checkpoints.tidy

    def write_state(model: Any, file: Path) -> None:
        nonlocal seen
        write(model, file)
        if file.name != checkpoints.WEIGHTS:
            return
        seen += 1
        if seen == save and moment == "weights":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
            die()

    def mark_whole(folder: Path, about: Any) -> None:
        if seen == save and moment == "unmarked":
            die()
        mark(folder, about)
        if seen == save and moment == "marked":
            die()

    def tidied(folder: Path, keep: Any) -> None:
        tidy(folder, keep)
        if seen == save and moment == "tidied":
            die()

    checkpoints.write_state, checkpoints.mark_whole, checkpoints.tidy = write_state, mark_whole, tidied
    work()
