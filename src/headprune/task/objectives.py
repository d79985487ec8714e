"""The scalars that are differentiated, one per sample, and what a model predicts."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from headprune.errors import DataError
from headprune.units import AttentionSite

NOT_CONTENT = ("labels", "attention_mask", "token_type_ids", "decoder_attention_mask", "pixel_mask")
IGNORED = -100  # the label of tokens that do not count, as everywhere in transformers
Labels = Literal["given", "self"]


def batch_size(batch: Mapping[str, Any]) -> int:
    return next(int(value.shape[0]) for value in batch.values() if isinstance(value, torch.Tensor))


def model_inputs(model: PreTrainedModel, batch: Mapping[str, Any]) -> dict[str, Any]:
    """What the forward gets: no labels unless a decoder needs them to make its inputs, and no KV cache."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if model.config.is_encoder_decoder and "decoder_input_ids" not in batch and "labels" in batch:
        inputs["labels"] = batch["labels"]
    if getattr(model.config, "use_cache", False):
        inputs["use_cache"] = False
    return inputs


def with_decoder_inputs(model: PreTrainedModel, batch: dict[str, Any]) -> dict[str, Any]:
    """Where the decoder's inputs follow from the labels, they are in the batch from here on, as everything that asks
    for the decoder's tokens expects."""
    labels = batch.get("labels")
    if not model.config.is_encoder_decoder or "decoder_input_ids" in batch or labels is None or labels.dim() != 2:
        return batch
    if labels.is_floating_point() or not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return batch
    return {**batch, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels)}


def logits_of(output: Any) -> torch.Tensor:
    """What the model says: its logits, or the nearest thing that a model without a head has."""
    pairs = getattr(output, "logits_per_image", None)
    if isinstance(pairs, torch.Tensor):
        # A dual encoder compares every image with every text of the batch; a sample is one pair.
        return pairs.diagonal().unsqueeze(-1)
    for name in ("logits", "last_hidden_state"):
        value = getattr(output, name, None)
        if isinstance(value, torch.Tensor):
            return value
    raise DataError(f"{type(output).__name__} has neither logits nor hidden states, so it cannot be scored.")


def real_tokens(batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
    """Bool [batch x tokens] for the axis of the logits: True where a token is not padding."""
    mask = token_mask(batch, decoder=is_seq2seq(batch))
    if mask is None or mask.shape[1] != logits.shape[1]:
        return torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
    return mask


def is_seq2seq(batch: Mapping[str, Any]) -> bool:
    return "decoder_input_ids" in batch or ("input_features" in batch and "labels" in batch)


def token_mask(batch: Mapping[str, Any], *, decoder: bool) -> torch.Tensor | None:
    """Which tokens are real, on the decoder's or on the only (or encoder's) side; None where the batch does not say."""
    mask = batch.get("decoder_attention_mask") if decoder else batch.get("attention_mask")
    if mask is not None:
        return mask.bool()
    labels = batch.get("labels")
    return labels != IGNORED if decoder and labels is not None and labels.dim() == 2 else None


def query_tokens(site: AttentionSite, batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Which tokens of those that a site writes to are real; None where the batch does not say."""
    if site.stack == "vision":
        return None
    return token_mask(batch, decoder=is_seq2seq(batch) and site.stack == "decoder")


def is_causal_lm(model: PreTrainedModel) -> bool:
    name = type(model).__name__
    return name.endswith(("CausalLM", "LMHeadModel")) and not model.config.is_encoder_decoder


def targets_of(
    model: PreTrainedModel, batch: Mapping[str, Any], logits: torch.Tensor, labels: Labels
) -> torch.Tensor | None:
    """The label of each sample, or of each position of `logits` for language models; None if there are none."""
    classes = logits.shape[-1]
    if labels == "self":
        if logits.dim() == 2 and classes == 1:
            raise DataError('labels="self" gives a regression model a loss of 0; give it real labels.')
        predicted = logits.detach().argmax(-1)
        return predicted if logits.dim() == 2 else predicted.masked_fill(~real_tokens(batch, logits), IGNORED)
    given = batch.get("labels")
    if given is not None:
        _check_labels(given, logits)
    if logits.dim() == 3 and is_causal_lm(model):
        real = real_tokens(batch, logits)
        tokens = batch["input_ids"].masked_fill(~real, IGNORED) if given is None else given
        # Position t predicts token t + 1; the last position predicts nothing, and neither does padding.
        return functional.pad(tokens[:, 1:], (0, 1), value=IGNORED).masked_fill(~real, IGNORED)
    return given


def _check_labels(labels: torch.Tensor, logits: torch.Tensor) -> None:
    classes = logits.shape[-1]
    numbers = labels.is_floating_point()
    wanted = logits.shape if numbers and logits.dim() == 2 and classes > 1 else logits.shape[:-1]
    if labels.shape != wanted and not (classes == 1 and labels.shape == logits.shape):
        raise DataError(f"Labels of shape {list(labels.shape)} do not fit logits of shape {list(logits.shape)}.")
    if not numbers and classes > 1:
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= classes))]
        if wrong.numel():
            raise DataError(
                f"Label {int(wrong[0])} is out of range: the model has {classes} labels, numbered 0 to {classes - 1}."
            )


def losses(model: PreTrainedModel, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The task loss of each sample [batch], so that samples can be told apart after one backward pass."""
    logits = logits.float()
    if logits.dim() == 3:
        per_token = functional.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
        return per_token.sum(1) / (targets != IGNORED).sum(1).clamp_min(1)
    if logits.shape[-1] == 1:
        return (logits[:, 0] - targets.float()).square()
    if targets.is_floating_point():
        return functional.binary_cross_entropy_with_logits(logits, targets.float(), reduction="none").mean(-1)
    return functional.cross_entropy(logits, targets, reduction="none")


def logit_norms(logits: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    """The Euclidean norm of each sample's logits [batch], over its real tokens where there is a token axis."""
    logits = logits.float()
    if logits.dim() == 3:
        logits = logits * real_tokens(batch, logits).unsqueeze(-1)
    return logits.flatten(1).norm(dim=1)


def signed_logits(logits: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    """The logits of each sample added up with random signs, [batch].

    The expected square of its gradient is that of all logits together, from one backward pass. Half of a sample's
    classes count positive and half negative, since adding a constant to all of them changes nothing. The signs follow
    from the sample's own content, so they do not depend on the batch it is in.
    """
    real = real_tokens(batch, logits) if logits.dim() == 3 else None
    signs = torch.zeros(logits.shape, device=logits.device)
    for row in range(len(logits)):
        own = slice(None) if real is None else real[row]  # padding, wherever it stands, has no sign
        signs[row, own] = _signs(logits[row, own], _seed(batch, row)).to(signs)
    return (logits.float() * signs).flatten(1).sum(1)


def _signs(logits: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if logits.dim() == 1:
        if len(logits) == 1:
            return torch.ones(1)
        order = torch.randperm(len(logits), generator=generator)
        half = len(logits) // 2
        return torch.zeros(len(logits)).index_fill_(0, order[:half], 1.0).index_fill_(0, order[half : 2 * half], -1.0)
    signs = torch.randint(0, 2, logits.shape, generator=generator, dtype=torch.int8).float() * 2 - 1
    return signs - signs.mean(-1, keepdim=True)


def _seed(batch: Mapping[str, Any], row: int) -> int:
    name, value = next((n, v) for n, v in batch.items() if isinstance(v, torch.Tensor) and n not in NOT_CONTENT)
    mask = batch.get("attention_mask")
    content = value[row]
    if mask is not None and name == "input_ids" and mask.shape == value.shape:
        content = content[mask[row].bool()]
    return zlib.crc32(content.detach().cpu().double().numpy().tobytes())


def label_probabilities(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The probability of each sample's label [batch]; with a token axis, the mean over its labelled tokens."""
    probabilities = logits.float().softmax(-1)
    picked = probabilities.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    if picked.dim() == 1:
        return picked
    counted = targets != IGNORED
    return (picked * counted).sum(1) / counted.sum(1).clamp_min(1)
