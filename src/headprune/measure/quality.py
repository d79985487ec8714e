"""What a model predicts on labelled data, gathered from logits that some pass computes anyway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.task.objectives import IGNORED, batch_size, losses, targets_of


class Quality:
    """Predictions and losses, batch after batch, in the order of the data.

    For classifiers a prediction is a class per sample (or yes or no per label, where there can be several), for
    regressors a number, for language models a token at every labelled position.
    """

    def __init__(self) -> None:
        self.samples = self.counted = 0
        self.per_token = False
        self.loss_sum = self.counted_loss_sum = 0.0
        self._predictions: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []

    @torch.no_grad()
    def add(self, model: PreTrainedModel, batch: Mapping[str, Any], logits: torch.Tensor) -> None:
        targets = targets_of(model, batch, logits, "given")
        size = batch_size(batch)
        self.samples += size
        predicted = logits[:, 0] if logits.dim() == 2 and logits.shape[-1] == 1 else logits.argmax(-1)
        if logits.dim() == 3:
            self.per_token = True
            if targets is None:
                return
            counted = targets != IGNORED
            per_sample = losses(model, logits, targets).double()
            self.counted_loss_sum += float((per_sample * counted.sum(1)).sum())
            self.counted += int(counted.sum())
            self.loss_sum += float(per_sample.sum())
            predicted, targets = predicted[counted], targets[counted]
        elif targets is not None:
            if targets.dim() == 2:  # several labels per sample, each of them yes or no
                predicted, labels = (logits > 0).long(), targets.long()
            else:
                labels = targets
            per_sample = losses(model, logits, targets).double()
            self.loss_sum += float(per_sample.sum())
            self.counted_loss_sum, self.counted = self.loss_sum, self.samples
            targets = labels
        self._predictions.append(predicted.cpu())
        if targets is not None:
            self._labels.append(targets.cpu())

    @property
    def predictions(self) -> torch.Tensor | None:
        return torch.cat(self._predictions) if self._predictions else None

    @property
    def labels(self) -> torch.Tensor | None:
        return torch.cat(self._labels) if self._labels else None

    @property
    def loss(self) -> float | None:
        """Mean loss per sample."""
        return self.loss_sum / self.samples if self.counted else None

    @property
    def counted_loss(self) -> float | None:
        """Mean loss per prediction: per token for language models."""
        return self.counted_loss_sum / self.counted if self.counted else None
