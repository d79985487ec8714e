"""What a task is: everything that depends on what a model predicts, in one object per model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn

from headprune.batches import IGNORED, real_keys, to_device, widened
from headprune.errors import DataError
from headprune.units import Site

Labels = Literal["given", "self"]


class Parts(NamedTuple):
    """The loss of every sample as sums over what is counted: [batch x parts] each.

    The loss of a sample is the mean over the parts that it has of sum / count, and so is the loss of a batch, of the
    sums of both.
    """

    sums: torch.Tensor
    counts: torch.Tensor

    def per_sample(self) -> torch.Tensor:
        return (self.sums / self.counts.clamp_min(1)).sum(1) / (self.counts > 0).sum(1).clamp_min(1)


class Task:
    """Inputs, targets, loss per sample, predictions, metric and real tokens of one model.

    `logits` is whatever the model says that scores are derived from: [batch x classes], or [batch x tokens x classes].
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""  # for people, in the table of tasks
    data: ClassVar[str] = ""  # what a row of data holds, for the same table
    pipeline_tag: ClassVar[str] = ""  # what model hubs and transformers' pipelines call it
    label_names: ClassVar[tuple[str, ...]] = ("labels",)
    per_token: ClassVar[bool] = False  # whether logits have a token axis
    over_tokens: ClassVar[bool] = False  # whether a softmax goes over tokens and not over classes
    classes: ClassVar[bool] = True  # whether predictions are classes that can agree
    reduction: Literal["mean", "sum"] = "mean"  # how the model's own loss joins samples

    def __init__(self, model: nn.Module) -> None:
        self.config: Any = getattr(model, "config", None)
        self.encoder_decoder = bool(getattr(self.config, "is_encoder_decoder", False))
        self._decoder_inputs = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        self._lengths = _frame_lengths(model)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that fit, the usual one first."""
        return ("accuracy", "f1", "matthews")

    @property
    def same(self) -> str:
        """The name that makes this task for another model."""
        return self.name

    def __repr__(self) -> str:
        return f"<Task {self.name}>"

    # --- what goes in ---

    def prepare(self, batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """The batch on the device; where the decoder's inputs follow from the labels, they are in it from here on, as
        everything that asks for the decoder's tokens expects."""
        moved = to_device(batch, device)
        labels = moved.get("labels")
        if not self.encoder_decoder or "decoder_input_ids" in moved or "decoder_inputs_embeds" in moved:
            return moved
        if labels is None or labels.dim() != 2 or labels.is_floating_point() or self._decoder_inputs is None:
            return moved
        return {**moved, "decoder_input_ids": self._decoder_inputs(labels)}

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What the forward gets: no labels unless a decoder needs them to make its inputs, and no KV cache."""
        inputs = {name: value for name, value in batch.items() if name not in self.label_names}
        if self.encoder_decoder and "decoder_input_ids" not in batch and "labels" in batch:
            inputs["labels"] = batch["labels"]
        if getattr(self.config, "use_cache", False):
            inputs["use_cache"] = False
        return inputs

    def has_labels(self, batch: Mapping[str, Any]) -> bool:
        return all(name in batch for name in self.label_names)

    def rows(self, batch: Mapping[str, Any]) -> int:
        """How many rows of the model one sample is."""
        return 1

    # --- what comes out ---

    def logits(self, output: Any) -> torch.Tensor:
        for name in ("logits", "last_hidden_state"):
            value = getattr(output, name, None)
            if isinstance(value, torch.Tensor):
                return value
        raise DataError(f"{type(output).__name__} has neither logits nor hidden states, so it cannot be scored.")

    def predictions(self, logits: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        """A class per sample, or per position; numbers where the model predicts numbers."""
        return logits.argmax(-1)

    def embeddings(self, output: Any, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """What a sample is to a model without classes, [batch x width]; None where there are classes."""
        return None

    # --- what should come out ---

    def targets(self, batch: Mapping[str, Any], logits: torch.Tensor, labels: Labels = "given") -> torch.Tensor | None:
        """The labels in the form that `parts` takes, from the batch or the model's own; None where there are none."""
        if labels == "self":
            return self.own_targets(batch, logits)
        return self.given_targets(batch, logits) if self.has_labels(batch) else self.implied_targets(batch, logits)

    def given_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        return batch["labels"]

    def implied_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor | None:
        """Targets that need no labels (language models predict their inputs)."""
        return None

    def own_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        return self.predictions(logits.detach(), batch)

    def at_real_tokens(self, predicted: torch.Tensor, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        """Predictions [batch x tokens] as targets, in which padding does not count."""
        return predicted.masked_fill(~self.real_tokens(batch, logits), IGNORED)

    def reference(self, targets: torch.Tensor) -> torch.Tensor:
        """What predictions are compared with."""
        return targets

    def parts(self, logits: torch.Tensor, targets: torch.Tensor) -> Parts:
        raise DataError(f"A model of the task {self.name!r} has no loss that headprune knows; use a criterion without.")

    def losses(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The task loss of each sample [batch], so that samples can be told apart after one backward pass."""
        return self.parts(logits, targets).per_sample()

    def counts(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """How much each part of the loss counts in a batch [parts], before the model has run; None without targets.

        The loss of several batches together is that of one large one when each is divided by the counts of all.
        """
        return (batch["labels"] != IGNORED).sum().reshape(1) if self.has_labels(batch) else None

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss of the batch as the model itself computes it."""
        parts = self.parts(logits, targets)
        if self.reduction == "sum":
            return parts.per_sample().sum()
        return (parts.sums.sum(0) / parts.counts.sum(0)).mean()

    def label_probabilities(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The probability of each sample's label [batch]; with a token axis, the mean over its labelled tokens."""
        if targets.is_floating_point():
            raise DataError(f"A probability of the label needs one class per sample, which {self.name} has not.")
        probabilities = widened(logits).softmax(-1)
        picked = probabilities.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        if picked.dim() == 1:
            return picked
        counted = targets != IGNORED
        return (picked * counted).sum(1) / counted.sum(1).clamp_min(1)

    def check_classes(self, labels: torch.Tensor, logits: torch.Tensor) -> None:
        """Refuse labels that are not classes of the model, or have another shape than its predictions."""
        classes = logits.shape[-1]
        if labels.shape != logits.shape[:-1]:
            raise DataError(f"Labels of shape {list(labels.shape)} do not fit logits of shape {list(logits.shape)}.")
        if labels.is_floating_point():
            raise DataError(f"Labels of the task {self.name!r} are whole numbers, not {labels.dtype}; convert them.")
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= classes))]
        if wrong.numel():
            raise DataError(
                f"Label {int(wrong[0])} is out of range: the model has {classes} labels, numbered 0 to {classes - 1}."
            )

    # --- which tokens are real ---

    def has_decoder(self, batch: Mapping[str, Any]) -> bool:
        """Whether the decoder has tokens of its own; without them it works on those of the encoder."""
        return self.encoder_decoder and ("decoder_input_ids" in batch or "decoder_attention_mask" in batch)

    def token_mask(self, batch: Mapping[str, Any], *, decoder: bool = False) -> torch.Tensor | None:
        """Bool [rows x tokens] of the decoder's or the only (or encoder's) side; None where the batch does not say."""
        mask = real_keys(batch.get("decoder_attention_mask" if decoder else "attention_mask"))
        if mask is not None or not decoder:
            return mask
        labels = batch.get("labels")
        return labels != IGNORED if labels is not None and labels.dim() == 2 else None

    def real_tokens(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        """Bool [batch x tokens] for the token axis of the logits: True where a token is not padding."""
        mask = self.fitted(self.token_mask(batch, decoder=self.has_decoder(batch)), logits.shape[1])
        return torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device) if mask is None else mask

    def site_tokens(self, site: Site, batch: Mapping[str, Any], tokens: int) -> torch.Tensor | None:
        """Which of the `tokens` per row that a site writes to are real; None where the batch does not say."""
        if getattr(site, "stack", "") == "vision":
            return None
        decoder = self.has_decoder(batch) and getattr(site, "stack", "") == "decoder"
        return self.fitted(self.token_mask(batch, decoder=decoder), tokens)

    def key_tokens(self, site: Site, batch: Mapping[str, Any], tokens: int) -> torch.Tensor | None:
        """The same for the tokens that a site looks at, which in cross attention are those of the other side."""
        if getattr(site, "attention", "self") != "cross":
            return self.site_tokens(site, batch, tokens)
        if self.has_decoder(batch) and getattr(site, "stack", "") == "decoder":
            return self.fitted(self.token_mask(batch, decoder=False), tokens)
        return self.fitted(real_keys(batch.get("encoder_attention_mask")), tokens)

    def fitted(self, mask: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
        """The mask where it has this many tokens; of audio, one of frames from one of samples of sound."""
        if mask is None or mask.shape[-1] == tokens:
            return mask
        if self._lengths is None or mask.dim() != 2:
            return None
        lengths = self._lengths(mask.sum(-1)).to(mask.device)
        return torch.arange(tokens, device=mask.device) < lengths[:, None]


def _frame_lengths(model: nn.Module) -> Any:
    """The model's own rule for how many frames it makes of so much sound, if it has one."""
    for owner in (
        model,
        getattr(model, "base_model", None),
        getattr(getattr(model, "base_model", None), "encoder", None),
    ):
        for name in ("_get_feat_extract_output_lengths", "_get_subsampling_output_length"):
            rule = getattr(owner, name, None)
            if callable(rule):
                return rule
    return None


def cross_entropies(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every position, 0 where the target is ignored.

    Without gradients, blocks of positions at a time: a large vocabulary is not copied as a whole.
    """
    rows, classes = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    block = len(rows) if torch.is_grad_enabled() else max(1, BLOCK // rows.shape[-1])
    parts = [
        nn.functional.cross_entropy(
            widened(rows[start : start + block]),
            classes[start : start + block],
            ignore_index=IGNORED,
            reduction="none",
        )
        for start in range(0, max(len(rows), 1), block)
    ]
    return torch.cat(parts).view(targets.shape)


BLOCK = 1 << 20  # logits that are looked at together


def counted_parts(losses: torch.Tensor, counted: torch.Tensor) -> Parts:
    """Parts of one kind: losses and what counts of them, [batch] or [batch x tokens]."""
    size = len(losses)
    sums = (losses * counted).reshape(size, -1).sum(1, keepdim=True)
    return Parts(sums, counted.reshape(size, -1).sum(1, keepdim=True).to(sums.dtype))


TASKS: list[type[Task]] = []


def task(kind: type[Task]) -> type[Task]:
    """Register a task; the table of tasks lists them in this order."""
    assert all(kind.name != other.name for other in TASKS), f"two tasks are called {kind.name}"
    TASKS.append(kind)
    return kind
