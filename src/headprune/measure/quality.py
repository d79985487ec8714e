"""What a model predicts on data, gathered from outputs that some pass computes anyway."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from headprune import distributed
from headprune.tasks import IGNORED, Task, batch_size
from headprune.tasks.spec import Parts, counted_parts, cross_entropies


class Quality:
    """Predictions, labels and losses, batch after batch, in the order of the data. Two shards add up to one pass.

    A prediction is a class per sample (yes or no per label, where there can be several), a number or several, a span, a
    transcript, or a token at every position that counts; `owners` says to which sample each belongs. Models without
    classes have `embeddings` instead.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.samples = 0
        self._predictions: list[torch.Tensor] = []
        self._labels: list[torch.Tensor] = []
        self._owners: list[torch.Tensor] = []
        self._embeddings: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._counts: list[torch.Tensor] = []

    @torch.no_grad()
    def add(self, batch: Mapping[str, Any], output: Any, logits: torch.Tensor | None = None) -> None:
        """Take in what the model gave for a batch, which is on its device."""
        task = self.task
        logits = task.logits(output) if logits is None else logits
        size = batch_size(batch)
        embeddings = task.embeddings(output, batch)
        if embeddings is not None:
            self._embeddings.append(embeddings.cpu())
        elif logits.dim() <= 3:
            targets = task.targets(batch, logits)
            reference = None if targets is None else task.reference(targets)
            self._take(task.predictions(logits, batch), reference, batch, logits, size)
            if targets is not None:
                sums, counts = task.parts(logits, targets)
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
            if like is None:  # as large as all logits, and without memory of its own
                like = block.new_zeros(()).expand(shape)
                targets = self.task.targets(batch, like)
            end = first + block.shape[1]
            predicted.append(block.argmax(-1))
            if targets is not None:
                losses.append(cross_entropies(block, targets[:, first:end]))
            first = end
        assert like is not None
        size = batch_size(batch)
        self._take(torch.cat(predicted, 1), targets, batch, like, size)
        if targets is not None:
            sums, counts = counted_parts(torch.cat(losses, 1), targets != IGNORED)
            self._sums.append(sums.double().cpu())
            self._counts.append(counts.double().cpu())
        self.samples += size

    def _take(
        self,
        predicted: torch.Tensor,
        targets: torch.Tensor | None,
        batch: Mapping[str, Any],
        logits: torch.Tensor,
        size: int,
    ) -> None:
        owners = torch.arange(size, device=predicted.device)
        if predicted.dim() == 2 and predicted.shape == logits.shape[:2] and self.task.per_token:
            counted = self.task.real_tokens(batch, logits) if targets is None else targets != IGNORED
            owners = owners[:, None].expand(predicted.shape)[counted]
            predicted, targets = predicted[counted], None if targets is None else targets[counted]
        elif targets is not None and not targets.is_floating_point() and targets.dim() == 1:
            counted = targets != IGNORED  # a sample whose label does not count
            owners, predicted, targets = owners[counted], predicted[counted], targets[counted]
        self._predictions.append(predicted.cpu())
        self._owners.append(owners.cpu() + self.samples)
        if targets is not None:
            targets = targets[:, 0] if targets.is_floating_point() and targets.shape[1:] == (1,) else targets
            self._labels.append((targets if predicted.is_floating_point() else targets.long()).cpu())

    def __add__(self, other: Quality) -> Quality:
        """What one pass over both shards would have gathered."""
        return _in_order(self.task, [self, other])

    @classmethod
    def over_processes(cls, task: Task, batches: Mapping[int, Quality]) -> Quality:
        """Of all batches in the order of their numbers, from those that each process went over."""
        if not distributed.is_distributed():
            return _in_order(task, [batches[number] for number in sorted(batches)])
        for own in batches.values():
            own.task = None  # type: ignore[assignment]  # which knows the model, and that does not travel
        whole = {number: own for share in distributed.all_gather(dict(batches)) for number, own in share.items()}
        return _in_order(task, [whole[number] for number in sorted(whole)])

    @property
    def predictions(self) -> torch.Tensor | None:
        return _joined(self._predictions)

    @property
    def labels(self) -> torch.Tensor | None:
        return _joined(self._labels)

    @property
    def owners(self) -> torch.Tensor | None:
        return _joined(self._owners)

    @property
    def embeddings(self) -> torch.Tensor | None:
        return _joined(self._embeddings)

    @property
    def loss_parts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Sums and counts of the loss, [samples x parts] each."""
        return (torch.cat(self._sums), torch.cat(self._counts)) if self._sums else None

    @property
    def per_token(self) -> bool:
        return self.task.per_token

    @property
    def loss(self) -> float | None:
        """Mean loss per sample, over the samples that have one."""
        if self.loss_parts is None:
            return None
        parts = Parts(*self.loss_parts)
        has = parts.counts.sum(1) > 0
        return float(parts.per_sample()[has].mean()) if has.any() else None

    @property
    def counted_loss(self) -> float | None:
        """Mean loss per prediction: per token for language models."""
        if self.loss_parts is None:
            return None
        sums, counts = (part.sum(0) for part in self.loss_parts)
        return float((sums / counts).mean()) if (counts > 0).all() else None


def _in_order(task: Task, parts: Sequence[Quality]) -> Quality:
    whole = Quality(task)
    for part in parts:
        for name in ("_predictions", "_labels", "_embeddings", "_sums", "_counts"):
            getattr(whole, name).extend(getattr(part, name))
        whole._owners += [owners + whole.samples for owners in part._owners]
        whole.samples += part.samples
    return whole


def _joined(parts: list[torch.Tensor]) -> torch.Tensor | None:
    if not parts:
        return None
    if parts[0].dim() == 2 and len({part.shape[1] for part in parts}) > 1:  # transcripts of different lengths
        longest = max(part.shape[1] for part in parts)
        parts = [torch.nn.functional.pad(part, (0, longest - part.shape[1]), value=IGNORED) for part in parts]
    return torch.cat(parts)
