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
    """What the student's predictions are away from the teacher's [batch]: the divergence of what is predicted as a
    distribution, the squared error of what is predicted as a number."""
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
    found = divergence(student, teacher, temperature)
    if found.dim() == 1:
        return found
    real = task.real_tokens(batch, student)
    return (found * real).sum(1) / real.sum(1).clamp_min(1)


def divergence(
    student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0, real: torch.Tensor | None = None
) -> torch.Tensor:
    """KL(teacher || student) over the last axis, both softened; times the square of the temperature, which keeps the
    size of gradients. What is not `real` can be no answer."""
    ours, theirs = student / temperature, teacher / temperature
    if real is not None:
        ours, theirs = (logits.masked_fill(~real, torch.finfo(logits.dtype).min) for logits in (ours, theirs))
    ours, theirs = ours.log_softmax(-1), theirs.log_softmax(-1)
    terms = functional.kl_div(ours, theirs, log_target=True, reduction="none")
    if real is not None:
        terms = terms.masked_fill(~real, 0.0)
    return terms.sum(-1) * temperature**2


def bernoulli_divergence(student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """The same for every label by itself, where a sample may have several."""
    ours, theirs = student / temperature, teacher / temperature
    yes = theirs.sigmoid() * (functional.logsigmoid(theirs) - functional.logsigmoid(ours))
    no = (-theirs).sigmoid() * (functional.logsigmoid(-theirs) - functional.logsigmoid(-ours))
    return (yes + no) * temperature**2


def relative_error(student: torch.Tensor, teacher: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
    """Squared error relative to the teacher's square, over a sample's real tokens [batch]."""
    gap, size = (student - teacher).square(), teacher.square()
    if real is not None:
        shown = real.reshape(*real.shape, *([1] * (gap.dim() - real.dim())))
        gap, size = gap * shown, size * shown
    floor = torch.finfo(size.dtype).eps
    return gap.flatten(1).sum(1) / size.flatten(1).sum(1).clamp_min(floor)


def hidden_error(task: Task, student: Any, teacher: Any, batch: Mapping[str, Any]) -> torch.Tensor | None:
    """The relative error of hidden states, the mean over layers [batch]; None where no widths match.

    Removing heads and neurons leaves the width of the residual stream as it is, so each layer has its counterpart.
    """
    found = []
    for name in STATES:
        ours, theirs = getattr(student, name, None), getattr(teacher, name, None)
        if isinstance(ours, Sequence) and isinstance(theirs, Sequence) and len(ours) == len(theirs):
            pairs = list(zip(ours, theirs, strict=True))[1:]  # the first is what goes into the layers
            decoder = name.startswith("decoder") or (name == "hidden_states" and task.has_decoder(batch))
            found += [_layer_error(task, *pair, batch, decoder) for pair in pairs if pair[0].shape == pair[1].shape]
    return torch.stack(found).mean(0) if found else None


def _layer_error(
    task: Task, student: torch.Tensor, teacher: torch.Tensor, batch: Mapping[str, Any], decoder: bool
) -> torch.Tensor:
    """Of one layer [samples]; a sample of several rows (multiple choice) is all of them."""
    size = batch_size(batch)
    real = None
    if student.dim() == 3:
        mask = task.fitted(task.token_mask(batch, decoder=decoder), student.shape[1])
        real = mask.reshape(size, -1) if mask is not None and mask.shape == student.shape[:2] else None
    ours, theirs = (widened(states).reshape(size, -1, states.shape[-1]) for states in (student, teacher))
    return relative_error(ours, theirs, real)


def _real(task: Task, batch: Mapping[str, Any], values: torch.Tensor) -> torch.Tensor | None:
    return task.real_tokens(batch, values) if values.dim() == 3 else None
