"""Tasks with one prediction per token: token classification, and language models of all kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from headprune.batches import IGNORED
from headprune.errors import DataError
from headprune.tasks.spec import Parts, Task, counted_parts, cross_entropies, task


class PerToken(Task):
    """Logits [batch x tokens x classes], cross entropy over the positions that have a label."""

    per_token = True

    def given_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        self.check_classes(batch["labels"], logits)
        return batch["labels"]

    def own_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        return self.at_real_tokens(logits.detach().argmax(-1), batch, logits)

    def parts(self, logits: torch.Tensor, targets: torch.Tensor) -> Parts:
        return counted_parts(cross_entropies(logits, targets), targets != IGNORED)


@task
class TokenClassification(PerToken):
    name = "token-classification"
    pipeline_tag = "token-classification"
    title = "Token classification (tagging)"
    data = "a list of words and a list of tags"

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("accuracy", "f1", "matthews")


class LanguageModel(PerToken):
    @property
    def metrics(self) -> tuple[str, ...]:
        return ("perplexity", "accuracy")


@task
class MaskedLM(LanguageModel):
    name = "masked-lm"
    pipeline_tag = "fill-mask"
    title = "Masked language models"
    data = "text; a seeded share of the tokens is hidden"


@task
class CausalLM(LanguageModel):
    """Every token is predicted from those before it; without labels, the targets are the inputs."""

    name = "causal-lm"
    pipeline_tag = "text-generation"
    title = "Causal language models"
    data = "text"

    def given_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        labels = batch["labels"]
        hidden = logits.shape[1] - labels.shape[1] if labels.dim() == 2 else 0
        if hidden > 0:  # tokens that the model inserts (of an image) come first, and have no targets
            labels = functional.pad(labels[:, 1:], (hidden + 1, 0), value=IGNORED)
        self.check_classes(labels, logits)
        targets = functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        # What padding on the left predicts, the first token of a text, does not count.
        return targets.masked_fill(~self.real_tokens(batch, logits), IGNORED)

    def counts(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        if self.has_labels(batch):
            labelled = batch["labels"][:, 1:] != IGNORED
            mask = self.token_mask(batch)
            if mask is not None and mask.shape == batch["labels"].shape:
                labelled &= mask[:, :-1]
            return labelled.sum().reshape(1)
        if "input_ids" not in batch:
            return None
        targets = self.implied_targets(batch, batch["input_ids"].unsqueeze(-1))
        return None if targets is None else (targets != IGNORED).sum().reshape(1)

    def implied_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor | None:
        if "input_ids" not in batch or batch["input_ids"].shape != logits.shape[:2]:
            return None
        real = self.real_tokens(batch, logits)
        # Padding has no target, and is no target.
        tokens = batch["input_ids"].masked_fill(~real, IGNORED)
        return functional.pad(tokens[:, 1:], (0, 1), value=IGNORED).masked_fill(~real, IGNORED)


@task
class ImageTextToText(CausalLM):
    name = "image-text-to-text"
    pipeline_tag = "image-text-to-text"
    title = "Image-text models (LLaVA, Qwen-VL, ...)"
    data = "text; with images, batches of pixel values and token ids, from Python"


@task
class Seq2SeqLM(LanguageModel):
    name = "seq2seq-lm"
    pipeline_tag = "text2text-generation"
    title = "Sequence-to-sequence models (translation, summaries, speech)"
    data = "text and a target text; speech as batches, from Python"

    def given_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        labels = batch["labels"]
        if labels.shape[1] != logits.shape[1]:
            raise DataError(f"Labels of shape {list(labels.shape)} do not fit logits of shape {list(logits.shape)}.")
        self.check_classes(labels, logits)
        return labels


@task
class SpeechCTC(Task):
    """Audio frames to a shorter text; the blank is the padding token, and labels are padded with -100."""

    name = "ctc"
    pipeline_tag = "automatic-speech-recognition"
    title = "Speech recognition by CTC"
    data = "batches of input values or features and token ids, from Python"
    per_token = True
    transcribes = True

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.reduction = self.config.ctc_loss_reduction
        self.blank = self.config.pad_token_id

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("error_rate",)

    def given_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        """The number of frames of each sample, which the loss needs as well, followed by its labels."""
        frames = self.real_tokens(batch, logits).sum(-1, keepdim=True)
        return torch.cat([frames, batch["labels"]], dim=1)

    def counts(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        return torch.tensor([len(batch["labels"])]) if self.has_labels(batch) else None

    def own_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        return self.given_targets({**batch, "labels": self.predictions(logits.detach(), batch)}, logits)

    def reference(self, targets: torch.Tensor) -> torch.Tensor:
        labels = targets[:, 1:]
        return labels.masked_fill(labels == self.blank, IGNORED)

    def predictions(self, logits: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        """The best path without repeats and blanks, padded with -100."""
        path = logits.argmax(-1).masked_fill(~self.real_tokens(batch, logits), self.blank)
        previous = functional.pad(path[:, :-1], (1, 0), value=self.blank)
        emitted = (path != self.blank) & (path != previous)
        rows = [row[selected] for row, selected in zip(path, emitted, strict=True)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=IGNORED)

    def parts(self, logits: torch.Tensor, targets: torch.Tensor) -> Parts:
        frames, labels = targets[:, 0], targets[:, 1:]
        valid = (labels >= 0) & (labels != self.blank)
        lengths = valid.sum(-1)
        losses = functional.ctc_loss(
            functional.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1),
            labels[valid],
            frames,
            lengths,
            blank=self.blank,
            reduction="none",
            zero_infinity=self.config.ctc_zero_infinity,
        )
        if self.reduction == "mean":
            losses = losses / lengths.clamp_min(1)
        return counted_parts(losses, torch.ones_like(losses, dtype=torch.bool))
