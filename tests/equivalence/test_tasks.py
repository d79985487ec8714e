"""The loss of every task is the model's own: of a batch, and of each sample alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headprune
from task_models import CASES, TaskCase, without_padded_predictions

# A loss is a sum of at most a few hundred float32 terms of size 1: 1e-5 of it is far above their rounding.
TOLERANCE = 1e-5


def own_loss(model: Any, batch: dict[str, torch.Tensor]) -> float:
    with torch.no_grad():
        return float(model(**without_padded_predictions(batch)).loss)


def rows(batch: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    return {name: value[row : row + 1] for name, value in batch.items()}


def losses(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, list[float]]:
    task = headprune.task_of(model)
    prepared = task.prepare(batch, torch.device("cpu"))
    with torch.no_grad():
        logits = task.logits(model(**task.inputs(prepared)))
        targets = task.targets(prepared, logits)
        return float(task.loss(logits, targets)), task.losses(logits, targets).tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_loss_is_the_models_own(case: TaskCase) -> None:
    model, batch = case.build(), case.batch(0)
    assert headprune.task_of(model).name == case.task
    loss, per_sample = losses(model, batch)
    assert loss == pytest.approx(own_loss(model, batch), rel=TOLERANCE, abs=TOLERANCE)
    for row, value in enumerate(per_sample):
        alone = own_loss(model, rows(batch, row))
        if alone == alone:  # a sample whose label does not count has no loss of its own
            assert value == pytest.approx(alone, rel=TOLERANCE, abs=TOLERANCE), row


def test_every_task_with_a_loss_has_two_families() -> None:
    from headprune.tasks import TASKS

    without = {"features", "similarity", "video-classification"}
    families: dict[str, set[str]] = {}
    for case in CASES:
        families.setdefault(case.task, set()).add(type(case.build()).__name__)
    assert {kind.name for kind in TASKS} - without == set(families)
    assert all(len(actual) >= 2 for actual in families.values()), families
