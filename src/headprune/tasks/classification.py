"""Tasks with one prediction per sample: classes, several labels at once, or numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from headprune.batches import IGNORED, batch_size, widened
from headprune.errors import DataError
from headprune.tasks.spec import Parts, Task, counted_parts, cross_entropies, task

SINGLE, MULTIPLE, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
PROBLEMS = (SINGLE, MULTIPLE, REGRESSION)


@task
class SequenceClassification(Task):
    """Classes, several labels or numbers, by `problem_type`, or, where the config has none, by the labels: the rule of
    transformers."""

    name = "sequence-classification"
    pipeline_tag = "text-classification"
    title = "Text classification and regression"
    data = "text (a pair as well) and a label, a list of labels, or a number"

    def __init__(self, model: Any, problem: str | None = None) -> None:
        super().__init__(model)
        self._problem = problem

    @property
    def problem(self) -> str:
        """The problem type before any labels were processed; single-label classification by default."""
        problem_type = self._problem or getattr(self.config, "problem_type", None)
        return problem_type or (REGRESSION if getattr(self.config, "num_labels", 2) == 1 else SINGLE)

    @property
    def transferable_name(self) -> str:
        return self._problem or self.name

    @property
    def classes(self) -> bool:  # type: ignore[override]
        return self.problem != REGRESSION

    @property
    def metrics(self) -> tuple[str, ...]:
        return {
            SINGLE: ("accuracy", "f1", "matthews"),
            MULTIPLE: ("f1", "subset_accuracy"),
            REGRESSION: ("pearson", "mse"),
        }[self.problem]

    def given_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        labels = batch["labels"]
        if self._problem is None and getattr(self.config, "problem_type", None) is None and logits.shape[-1] > 1:
            # The first labels decide, as in transformers.
            self._problem = MULTIPLE if labels.is_floating_point() else SINGLE
        if self.problem == SINGLE:
            labels = labels.reshape(-1) if labels.numel() == len(logits) else labels
            self.check_classes(labels, logits)
            return labels
        labels = labels.to(widened(logits).dtype).reshape(logits.shape) if labels.numel() == logits.numel() else labels
        if labels.shape != logits.shape:
            raise DataError(f"Labels of shape {list(labels.shape)} do not fit logits of shape {list(logits.shape)}.")
        return labels

    def counts(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        labels = batch.get("labels")
        single = self.problem == SINGLE and labels is not None and not labels.is_floating_point()
        if labels is None or (single and labels.numel() == batch_size(batch)):
            return super().counts(batch)
        return torch.tensor([batch_size(batch)], device=labels.device)

    def own_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        if self.problem == REGRESSION:
            raise DataError('labels="self" gives a regression model a loss of 0; give it real labels.')
        predicted = self.predictions(logits.detach(), batch)
        return predicted.float() if self.problem == MULTIPLE else predicted

    def predictions(self, logits: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        if self.problem == REGRESSION:
            return logits[:, 0] if logits.shape[-1] == 1 else logits
        return (logits > 0).long() if self.problem == MULTIPLE else logits.argmax(-1)

    def parts(self, logits: torch.Tensor, targets: torch.Tensor) -> Parts:
        logits = widened(logits)
        if self.problem == SINGLE:
            return counted_parts(cross_entropies(logits, targets), targets != IGNORED)
        if self.problem == REGRESSION:
            losses = (logits - targets).square().mean(-1)
        else:
            losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(-1)
        return counted_parts(losses, torch.ones_like(losses, dtype=torch.bool))


@task
class ImageClassification(SequenceClassification):
    name = "image-classification"
    pipeline_tag = "image-classification"
    title = "Image classification"
    data = "an image and a label: a folder per label, a table, an .npz, or a data set"


@task
class AudioClassification(SequenceClassification):
    name = "audio-classification"
    pipeline_tag = "audio-classification"
    title = "Audio classification"
    data = "batches of input values or features, from Python"


@task
class VideoClassification(SequenceClassification):
    name = "video-classification"
    pipeline_tag = "video-classification"
    title = "Video classification"
    data = "batches of pixel values, from Python"


@task
class MultipleChoice(Task):
    """Inputs [batch x choices x tokens]; for the model every choice is a row."""

    name = "multiple-choice"
    pipeline_tag = "multiple-choice"
    title = "Multiple choice"
    data = "text, a list of choices and the number of the right one"

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("accuracy",)

    def given_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        labels = batch["labels"].reshape(-1)
        self.check_classes(labels, logits)
        return labels

    def parts(self, logits: torch.Tensor, targets: torch.Tensor) -> Parts:
        return counted_parts(cross_entropies(logits, targets), targets != IGNORED)

    def rows(self, batch: Mapping[str, Any]) -> int:
        tensors = (batch[name] for name in ("input_ids", "inputs_embeds", "attention_mask") if name in batch)
        return int(next(tensors).shape[1])

    def token_mask(self, batch: Mapping[str, Any], *, decoder: bool = False) -> torch.Tensor | None:
        mask = batch.get("attention_mask")
        return None if mask is None else mask.bool().flatten(0, 1)
