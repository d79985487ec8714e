"""Predictions of a model on data, collected from the outputs of any forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from headprune import distributed
from headprune.errors import DataError, FormerName
from headprune.tasks import IGNORED, Task, batch_size
from headprune.tasks.spec import Parts, counted_parts, cross_entropies


class Predictions:
    """Predictions, labels and losses of a model, in the order of the data; two shards add up to one pass.

    A prediction is a class per sample (yes or no per label, where there can be several), a number or several, a span, a
    transcript, or a token at every position that counts; `sample_ids` has the sample that each belongs to. Models
    without classes have `embeddings` instead.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.samples = 0
        self._values: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []
        self._sample_ids: list[torch.Tensor] = []
        self._embeddings: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []

    @torch.no_grad()
    def add(self, batch: Mapping[str, Any], output: Any, logits: torch.Tensor | None = None) -> None:
        """Add the outputs of the model for a batch, which is on its device."""
        task = self.task
        logits = task.logits(output) if logits is None else logits
        size = batch_size(batch)
        embeddings = task.embeddings(output, batch)
        if embeddings is not None:
            self._embeddings.append(embeddings.cpu())
        elif logits.dim() <= 3:
            targets = task.targets(batch, logits)
            reference = None if targets is None else task.reference(targets)
            self._append(task.predictions(logits, batch), reference, batch, logits, size)
            if targets is not None:
                sums, counts = task.parts(task.without_padding(logits, batch), targets)
                self._sums.append(sums.double().cpu())
                self._counts.append(counts.double().cpu())
        self.samples += size

    @torch.no_grad()
    def add_blocks(self, batch: Mapping[str, Any], shape: torch.Size, blocks: Iterable[torch.Tensor]) -> None:
        """The same from logits of this shape in blocks of tokens, for a task that predicts a class per token."""
        like: torch.Tensor | None = None
        targets: torch.Tensor | None = None
        predicted, losses, first = [], [], 0
        for block in blocks:
            if like is None:  # of the shape of all logits, with the memory of a scalar
                like = block.new_zeros(()).expand(shape)
                targets = self.task.targets(batch, like)
            end = first + block.shape[1]
            predicted.append(block.argmax(-1))
            if targets is not None:
                losses.append(cross_entropies(block, targets[:, first:end]))
            first = end
        assert like is not None
        size = batch_size(batch)
        self._append(torch.cat(predicted, 1), targets, batch, like, size)
        if targets is not None:
            sums, counts = counted_parts(torch.cat(losses, 1), targets != IGNORED)
            self._sums.append(sums.double().cpu())
            self._counts.append(counts.double().cpu())
        self.samples += size

    def _append(
        self,
        predicted: torch.Tensor,
        targets: torch.Tensor | None,
        batch: Mapping[str, Any],
        logits: torch.Tensor,
        size: int,
    ) -> None:
        sample_ids = torch.arange(size, device=predicted.device)
        per_token = self.task.per_token and not self.task.transcribes
        if per_token and predicted.dim() == 2 and predicted.shape == logits.shape[:2]:
            counted = self.task.real_tokens(batch, logits) if targets is None else targets != IGNORED
            sample_ids = sample_ids[:, None].expand(predicted.shape)[counted]
            predicted, targets = predicted[counted], None if targets is None else targets[counted]
        elif targets is not None and not targets.is_floating_point() and targets.dim() == 1:
            counted = targets != IGNORED  # a sample whose label does not count
            sample_ids, predicted, targets = sample_ids[counted], predicted[counted], targets[counted]
        self._values.append(predicted.cpu())
        self._sample_ids.append(sample_ids.cpu() + self.samples)
        if targets is not None:
            targets = targets[:, 0] if targets.is_floating_point() and targets.shape[1:] == (1,) else targets
            self._labels.append((targets if predicted.is_floating_point() else targets.long()).cpu())
        self._check_labels()

    def _check_labels(self) -> None:
        """Predictions and labels are compared element by element, so either all batches have labels or none has."""
        if 0 < len(self._labels) < len(self._values):
            raise DataError(
                "Some batches have labels and others have none; give labels to all of them, or leave them out."
            )

    def __add__(self, other: Predictions) -> Predictions:
        """What one pass over both shards would have gathered."""
        return _in_order(self.task, [self, other])

    @classmethod
    def over_processes(cls, task: Task, batches: Mapping[int, Predictions]) -> Predictions:
        """The predictions of all batches in the order of their numbers, gathered from all processes."""
        if not distributed.is_distributed():
            return _in_order(task, [batches[number] for number in sorted(batches)])
        for predictions_of_batch in batches.values():
            predictions_of_batch.task = None  # type: ignore[assignment]  # holds the model, which is not sent
        whole = {
            number: predictions_of_batch
            for share in distributed.all_gather(dict(batches))
            for number, predictions_of_batch in share.items()
        }
        return _in_order(task, [whole[number] for number in sorted(whole)])

    @property
    def values(self) -> torch.Tensor | None:
        return _concatenate(self._values)

    predictions, owners = FormerName("values"), FormerName("sample_ids")

    @property
    def labels(self) -> torch.Tensor | None:
        return _concatenate(self._labels)

    @property
    def sample_ids(self) -> torch.Tensor | None:
        return _concatenate(self._sample_ids)

    @property
    def embeddings(self) -> torch.Tensor | None:
        return _concatenate(self._embeddings)

    @property
    def loss_parts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Sums and counts of the loss, [samples x parts] each."""
        return (torch.cat(self._sums), torch.cat(self._counts)) if self._sums else None

    @property
    def per_token(self) -> bool:
        return self.task.per_token

    @property
    def loss(self) -> float | None:
        """Mean loss per sample, over the samples that have one; where tokens have labels, that of a sample is the mean
        over its tokens."""
        if self.loss_parts is None:
            return None
        parts = Parts(*self.loss_parts)
        counted = parts.counts.sum(1) > 0
        return float(parts.per_sample()[counted].mean()) if counted.any() else None

    @property
    def token_loss(self) -> float | None:
        """Mean loss per label: over all labelled tokens at once, as a model of transformers computes the loss of a
        batch; where a sample has one label, the same as `loss`."""
        if self.loss_parts is None:
            return None
        sums, counts = (part.sum(0) for part in self.loss_parts)
        return float((sums / counts).mean()) if (counts > 0).all() else None


def _in_order(task: Task, parts: Sequence[Predictions]) -> Predictions:
    whole = Predictions(task)
    for part in parts:
        for name in ("_values", "_labels", "_embeddings", "_sums", "_counts"):
            getattr(whole, name).extend(getattr(part, name))
        whole._sample_ids += [sample_ids + whole.samples for sample_ids in part._sample_ids]
        whole.samples += part.samples
    whole._check_labels()
    return whole


def _concatenate(parts: list[torch.Tensor]) -> torch.Tensor | None:
    if not parts:
        return None
    if parts[0].dim() == 2 and len({part.shape[1] for part in parts}) > 1:  # transcripts of different lengths
        longest = max(part.shape[1] for part in parts)
        parts = [torch.nn.functional.pad(part, (0, longest - part.shape[1]), value=IGNORED) for part in parts]
    return torch.cat(parts)
