"""One batch through an instrumented model: a forward, and one backward per objective that was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.errors import DataError
from headprune.hooks.outputs import evaluating, to_device
from headprune.hooks.probe import probabilities
from headprune.hooks.watch import frozen, watched
from headprune.signals.attribution import attributions
from headprune.signals.entropy import EntropyMeter
from headprune.signals.gradients import GradientMeter, NotPerSampleError
from headprune.signals.requests import (
    Attribution,
    Entropy,
    GradientRequest,
    Request,
    ResidualErrors,
    ZeroProbabilities,
)
from headprune.signals.residuals import ErrorMeter, Residuals
from headprune.task.objectives import (
    Labels,
    batch_size,
    logit_norms,
    logits_of,
    losses,
    model_inputs,
    real_tokens,
    signed_logits,
    targets_of,
    with_decoder_inputs,
)
from headprune.units import AttentionSite


@dataclass(frozen=True)
class Observation:
    """The answers to the requests, and what the very same forward says about the model's quality."""

    answers: dict[Request, torch.Tensor]
    logits: torch.Tensor
    targets: torch.Tensor | None
    tokens: int


def observe(
    model: PreTrainedModel,
    sites: Sequence[AttentionSite],
    batch: Mapping[str, Any],
    requests: Iterable[Request],
    *,
    labels: Labels = "given",
    residuals: Residuals | None = None,
) -> Observation:
    """Answer all requests on one batch with the cheapest pass that serves them.

    Requests for residuals need them as `residual_maps` fits them on all the data.

    The model runs in eval mode with frozen parameters and comes back as it was.
    """
    wanted = list(dict.fromkeys(requests))
    inputs = with_decoder_inputs(model, to_device(batch, next(model.parameters()).device))
    try:
        return _observe(model, sites, inputs, wanted, labels, residuals)
    except NotPerSampleError:
        # A projection was applied to something that all samples share (DeBERTa's positions with share_att_key): only
        # one sample at a time tells whose gradient it is. A gradient of the whole batch need not know.
        whole = [
            request for request in wanted if isinstance(request, GradientRequest) and request.aggregation == "batch"
        ]
        rest = [request for request in wanted if request not in whole]
        parts = [_observe(model, sites, sample, rest, labels, residuals) for sample in _samples(inputs)]
        joined = _joined(parts, rest)
        if whole:
            joined.answers.update(_observe(model, sites, inputs, whole, labels, residuals).answers)
        return joined


def _observe(
    model: PreTrainedModel,
    sites: Sequence[AttentionSite],
    batch: Mapping[str, Any],
    requests: Sequence[Request],
    labels: Labels,
    residuals: Residuals | None,
) -> Observation:
    size = batch_size(batch)
    gradients = [request for request in requests if isinstance(request, GradientRequest)]
    entropies = [request for request in requests if isinstance(request, (Entropy, ZeroProbabilities))]
    meter = GradientMeter(model, sites, gradients, size, residuals)
    entropy = EntropyMeter(sites, entropies, batch, size)
    errors = None
    if ResidualErrors() in requests:
        errors = ErrorMeter(model, sites, residuals or {}, batch, size)
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(frozen(model))
        stack.enter_context(torch.set_grad_enabled(bool(gradients)))
        if gradients:
            stack.enter_context(
                watched(
                    model,
                    sites,
                    projection=meter.projection if meter.needs_projections else None,
                    output=meter.output if meter.needs_outputs else None,
                )
            )
        if errors is not None:
            stack.enter_context(errors.watching())
        if entropies:
            stack.enter_context(probabilities(model, sites, entropy))
        logits = logits_of(model(**model_inputs(model, batch)))
        needs_targets = any(request.objective == "loss" for request in gradients) or "labels" in batch
        targets = targets_of(model, batch, logits, labels) if needs_targets else None
        backwards = list(dict.fromkeys(request.backward for request in gradients))
        for number, (objective, aggregation) in enumerate(backwards, start=1):
            scalars = _objective(model, objective, logits, targets, batch)
            scalar = scalars.sum() if aggregation == "sample" else _batch_scalar(objective, scalars)
            if not torch.isfinite(scalar):  # its gradient may well be 0, which would pass for a score
                scalar = scalar * torch.nan
            meter.start((objective, aggregation))
            if scalar.requires_grad:  # a model without any head left has nothing to differentiate
                scalar.backward(retain_graph=number < len(backwards))
            meter.finish()
    answers: dict[Request, torch.Tensor] = {**meter.answers(), **entropy.answers()}
    for request in requests:
        if isinstance(request, Attribution):
            answers[request] = attributions(model, sites, batch, request, labels)
    if errors is not None:
        answers[ResidualErrors()] = errors.answer()
    detached = logits.detach()
    tokens = int(real_tokens(batch, detached).sum()) if detached.dim() == 3 else _count_tokens(batch, size)
    return Observation(answers, detached, targets, tokens)


def _objective(
    model: PreTrainedModel,
    objective: str,
    logits: torch.Tensor,
    targets: torch.Tensor | None,
    batch: Mapping[str, Any],
) -> torch.Tensor:
    if objective == "logit-norm":
        return logit_norms(logits, batch)
    if objective == "logit-signs":
        return signed_logits(logits, batch)
    if targets is None:
        raise DataError(
            'This criterion needs labels and the batches have none; add a "labels" entry, or use labels="self" to take '
            "the model's own predictions."
        )
    return losses(model, logits, targets)


def _batch_scalar(objective: str, scalars: torch.Tensor) -> torch.Tensor:
    """One scalar for the whole batch: the Frobenius norm of all its logits, or its mean loss."""
    return scalars.square().sum().sqrt() if objective == "logit-norm" else scalars.mean()


def _count_tokens(batch: Mapping[str, Any], size: int) -> int:
    mask = batch.get("attention_mask")
    if mask is not None:
        return int(mask.sum())
    ids = batch.get("input_ids")
    return size if ids is None else int(ids.numel())


def _samples(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    size = batch_size(batch)
    return [
        {
            name: value[index : index + 1] if isinstance(value, torch.Tensor) and value.shape[:1] == (size,) else value
            for name, value in batch.items()
        }
        for index in range(size)
    ]


def _joined(parts: Sequence[Observation], requests: Sequence[Request]) -> Observation:
    answers = {request: torch.cat([part.answers[request] for part in parts], dim=-3) for request in requests}
    targets = [part.targets for part in parts if part.targets is not None]
    return Observation(
        answers,
        torch.cat([part.logits for part in parts]),
        torch.cat(targets) if targets else None,
        sum(part.tokens for part in parts),
    )
