"""The losses of recovery against closed forms: divergences, errors, real tokens, and what a batch counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributions import Bernoulli, Categorical, kl_divergence

from headprune.errors import TrainingError
from headprune.tasks import task_of
from headprune.training.losses import (
    bernoulli_divergence,
    distillation,
    divergence,
    hidden_error,
    relative_error,
)
from task_models import CASES, TaskCase
from zoo import ZOO, text_batch

EXACT = 1e-12  # float64, a few operations
TASKS = [pytest.param(case, id=case.id) for case in CASES]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bert_task(name: str, **batch: Any) -> Any:
    case = next(case for case in CASES if case.id == name)
    return task_of(case.build())


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_divergence_is_that_of_softened_distributions(temperature: float) -> None:
    student, teacher = numbers(4, 7), numbers(4, 7, seed=1)
    expected = kl_divergence(Categorical(logits=teacher / temperature), Categorical(logits=student / temperature))
    assert torch.allclose(divergence(student, teacher, temperature), temperature**2 * expected, atol=EXACT)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_several_labels_are_coins(temperature: float) -> None:
    student, teacher = numbers(4, 3), 4 * numbers(4, 3, seed=1)
    expected = kl_divergence(Bernoulli(logits=teacher / temperature), Bernoulli(logits=student / temperature))
    actual = bernoulli_divergence(student, teacher, temperature)
    assert torch.allclose(actual, temperature**2 * expected, atol=EXACT)


def test_certain_teachers_give_finite_numbers() -> None:
    student, teacher = torch.tensor([[60.0, -60.0]]), torch.tensor([[-200.0, 200.0]])
    assert torch.isfinite(bernoulli_divergence(student, teacher)).all()
    assert torch.isfinite(divergence(student, teacher)).all()


def test_what_is_no_answer_does_not_count() -> None:
    """The divergence over the real answers alone."""
    student, teacher = numbers(2, 6), numbers(2, 6, seed=1)
    real = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    actual = divergence(student, teacher, 2.0, real)
    assert torch.allclose(actual[0], divergence(student[0, :4], teacher[0, :4], 2.0), atol=EXACT)
    assert torch.allclose(actual[1], divergence(student[1], teacher[1], 2.0), atol=EXACT)


def test_relative_error() -> None:
    student, teacher = numbers(3, 5, 4), numbers(3, 5, 4, seed=1)
    real = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] + [False] * 4])
    actual = relative_error(student, teacher, real)
    for row in range(3):
        ours, theirs = student[row][real[row]], teacher[row][real[row]]
        assert torch.allclose(actual[row], (ours - theirs).norm() ** 2 / theirs.norm() ** 2, atol=EXACT)
    assert relative_error(teacher, torch.zeros_like(teacher)).isfinite().all()


def test_padding_teaches_nothing() -> None:
    """Other logits at padding, the same loss, for tokens, spans and features."""
    batch = text_batch(0)
    padding = batch["attention_mask"] == 0
    assert padding.any()
    features = task_of(ZOO["bert"].build(), "features")
    for task in (bert_task("token-classification-bert"), bert_task("question-answering-bert"), features):
        student, teacher = numbers(*padding.shape, 2), numbers(*padding.shape, 2, seed=1)
        before = distillation(task, student, teacher, batch, 2.0)
        changed = torch.where(padding.unsqueeze(-1), student + 5, student)
        assert torch.allclose(distillation(task, changed, teacher, batch, 2.0), before, atol=EXACT), task


def test_tokens_are_averaged_within_their_sample() -> None:
    task, batch = bert_task("token-classification-bert"), text_batch(0)
    real = batch["attention_mask"].bool()
    student, teacher = numbers(*real.shape, 3), numbers(*real.shape, 3, seed=1)
    actual = distillation(task, student, teacher, batch, 2.0)
    for row in range(len(real)):
        assert torch.allclose(actual[row], divergence(student[row], teacher[row], 2.0)[real[row]].mean(), atol=EXACT)


def test_numbers_are_compared_as_numbers() -> None:
    task = bert_task("sequence-classification-regression-bert")
    student, teacher = numbers(3, 1), numbers(3, 1, seed=1)
    assert torch.equal(distillation(task, student, teacher, {}, 7.0), (student - teacher).square()[:, 0])


@pytest.mark.parametrize("case", TASKS)
def test_a_student_like_its_teacher_has_nothing_to_learn(case: TaskCase) -> None:
    """Loss and gradient are zero, of predictions and of hidden states, for every task."""
    model = case.build()
    task, batch = task_of(model), case.batch(0)
    batch = task.prepare(batch, torch.device("cpu"))
    with torch.no_grad():
        output = model(**task.inputs(batch), output_hidden_states=True)
    logits = task.logits(output).double()
    if task.has_labels(batch):
        task.targets(batch, logits)  # where the config is silent, labels say what is predicted
    student = logits.clone().requires_grad_()
    actual = distillation(task, student, logits, batch, 2.0)
    assert actual.shape == (len(case.batch(0)["labels"] if "labels" in batch else logits),)
    actual.sum().backward()
    assert actual.abs().max() < EXACT
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-9  # a difference of two softmaxes
    apart = hidden_error(task, output, output, batch)
    assert apart is not None
    assert apart.shape == actual.shape
    assert apart.abs().max() == 0


@pytest.mark.parametrize("case", TASKS)
def test_a_batch_knows_what_it_counts_before_the_model_runs(case: TaskCase) -> None:
    model = case.build()
    task = task_of(model)
    batch = task.prepare(case.batch(0), torch.device("cpu"))
    with torch.no_grad():
        logits = task.logits(model(**task.inputs(batch)))
    targets = task.targets(batch, logits)
    assert targets is not None
    counts = task.counts(case.batch(0))
    assert counts is not None
    assert counts.tolist() == task.parts(logits, targets).counts.sum(0).tolist()


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_texts_are_their_own_labels_or_there_are_none(name: str) -> None:
    case = next(case for case in CASES if case.id == "causal-lm-own-gpt2")
    task = task_of(case.build()) if name == "gpt2" else bert_task("sequence-classification-bert")
    batch = text_batch(0)
    counts = task.counts(batch)
    if name == "bert":
        assert counts is None
    else:
        assert counts is not None
        assert counts.tolist() == [int((batch["attention_mask"].sum(1) - 1).sum())]


def test_hidden_states_of_other_widths_are_left_out() -> None:
    task, batch = bert_task("sequence-classification-bert"), text_batch(0)
    shape = batch["input_ids"].shape
    narrow, wide = (SimpleNamespace(hidden_states=tuple(numbers(*shape, w) for _ in range(3))) for w in (4, 8))
    assert hidden_error(task, narrow, wide, batch) is None
    assert hidden_error(task, SimpleNamespace(), wide, batch) is None
    mixed = SimpleNamespace(hidden_states=(*narrow.hidden_states[:2], wide.hidden_states[2] + 1))
    expected = relative_error(wide.hidden_states[2] + 1, wide.hidden_states[2], batch["attention_mask"].bool())
    assert torch.allclose(hidden_error(task, mixed, wide, batch), expected, atol=EXACT)


def test_other_predictions_cannot_be_compared() -> None:
    with pytest.raises(TrainingError, match="give the model that was pruned"):
        distillation(bert_task("sequence-classification-bert"), numbers(3, 4), numbers(3, 5), {})
