"""How far a pruned model is from the dense one: of predictions and of hidden states, one number per sample.

Every sample counts the same, however long it is, so that the loss of several batches is that of one large one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from headprune.batches import widened
from headprune.errors import TrainingError
from headprune.tasks import Task, batch_size
from headprune.tasks.classification import MULTIPLE, REGRESSION

STATES = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")


def distillation(
    task: Task, student: torch.Tensor, teacher: torch.Tensor, batch: Mapping[str, Any], temperature: float = 1.0
) -> torch.Tensor:
    """How far the student's predictions are from the teacher's [batch]: the KL divergence of distributions, the squared
    error of numbers."""
    if student.shape != teacher.shape:
        raise TrainingError(
            f"The dense model predicts {list(teacher.shape)} numbers for a batch and the pruned one "
            f"{list(student.shape)}, so they cannot be compared; give the model that was pruned, or no teacher."
        )
    student, teacher = widened(student), widened(teacher)
    problem = getattr(task, "problem", None)
    if problem == REGRESSION:
        return (student - teacher).square().flatten(1).mean(1)
    if problem == MULTIPLE:
        return bernoulli_divergence(student, teacher, temperature).flatten(1).mean(1)
    if not task.classes:
        return relative_error(student, teacher, _real(task, batch, student))
    if task.over_tokens:
        real = task.real_tokens(batch, student)
        return divergence(student.transpose(1, 2), teacher.transpose(1, 2), temperature, real.unsqueeze(1)).mean(1)
    per_token = divergence(student, teacher, temperature)
    if per_token.dim() == 1:
        return per_token
    real = task.real_tokens(batch, student)
    return (per_token * real).sum(1) / real.sum(1).clamp_min(1)


def divergence(
    student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0, real: torch.Tensor | None = None
) -> torch.Tensor:
    """KL(teacher || student) over the last axis at this temperature, times its square, which keeps gradients at their
    size. Padding, where `real` is false, has no probability."""
    student, teacher = student / temperature, teacher / temperature
    if real is not None:
        student, teacher = (logits.masked_fill(~real, torch.finfo(logits.dtype).min) for logits in (student, teacher))
    log_student, log_teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    terms = functional.kl_div(log_student, log_teacher, log_target=True, reduction="none")
    if real is not None:
        terms = terms.masked_fill(~real, 0.0)
    return terms.sum(-1) * temperature**2


def bernoulli_divergence(student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """The same for every label of multi-label classification."""
    student, teacher = student / temperature, teacher / temperature
    positive = teacher.sigmoid() * (functional.logsigmoid(teacher) - functional.logsigmoid(student))
    negative = (-teacher).sigmoid() * (functional.logsigmoid(-teacher) - functional.logsigmoid(-student))
    return (positive + negative) * temperature**2


def relative_error(student: torch.Tensor, teacher: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
    """Squared error relative to the teacher's square, over a sample's real tokens [batch]."""
    gap, size = (student - teacher).square(), teacher.square()
    if real is not None:
        mask = real.reshape(*real.shape, *([1] * (gap.dim() - real.dim())))
        gap, size = gap * mask, size * mask
    floor = torch.finfo(size.dtype).eps
    return gap.flatten(1).sum(1) / size.flatten(1).sum(1).clamp_min(floor)


def hidden_error(task: Task, student: Any, teacher: Any, batch: Mapping[str, Any]) -> torch.Tensor | None:
    """The relative error of hidden states, the mean over layers [batch]; None where no widths match.

    Removing heads and neurons leaves the width of the residual stream as it is, so each layer has its counterpart.
    """
    errors = []
    for name in STATES:
        states, targets = getattr(student, name, None), getattr(teacher, name, None)
        if isinstance(states, Sequence) and isinstance(targets, Sequence) and len(states) == len(targets):
            pairs = list(zip(states, targets, strict=True))[1:]  # the first are the embeddings
            decoder = name.startswith("decoder") or (name == "hidden_states" and task.has_decoder(batch))
            errors += [_layer_error(task, *pair, batch, decoder) for pair in pairs if pair[0].shape == pair[1].shape]
    return torch.stack(errors).mean(0) if errors else None


def _layer_error(
    task: Task, student: torch.Tensor, teacher: torch.Tensor, batch: Mapping[str, Any], decoder: bool
) -> torch.Tensor:
    """The error of one layer [samples]; a sample of several rows (multiple choice) counts with all of them."""
    size = batch_size(batch)
    real = None
    if student.dim() == 3:
        mask = task.fitted(task.token_mask(batch, decoder=decoder), student.shape[1])
        real = mask.reshape(size, -1) if mask is not None and mask.shape == student.shape[:2] else None
    student, teacher = (widened(states).reshape(size, -1, states.shape[-1]) for states in (student, teacher))
    return relative_error(student, teacher, real)


def _real(task: Task, batch: Mapping[str, Any], values: torch.Tensor) -> torch.Tensor | None:
    return task.real_tokens(batch, values) if values.dim() == 3 else None
