"""Extractive question answering: the positions where an answer begins and ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headprune.batches import IGNORED
from headprune.errors import DataError
from headprune.tasks.spec import Parts, Task, cross_entropies, task


@task
class QuestionAnswering(Task):
    """Logits [batch x tokens x 2]: of the first and of the last token of the answer."""

    name = "question-answering"
    pipeline_tag = "question-answering"
    title = "Extractive question answering"
    data = "question, context and answers (SQuAD's columns)"
    label_names = ("start_positions", "end_positions")
    per_token = True
    over_tokens = True

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("exact_match", "span_f1")

    def logits(self, output: Any) -> torch.Tensor:
        start, end = getattr(output, "start_logits", None), getattr(output, "end_logits", None)
        if start is None or end is None:
            raise DataError(
                f"{type(output).__name__} has no logits of starts and ends, so its answers cannot be compared; use a "
                "question answering model with start_logits and end_logits."
            )
        return torch.stack([start, end], dim=-1)

    def predictions(self, logits: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        """[batch x 2]: the most probable first and last token, without padding."""
        return self.without_padding(logits, batch).argmax(1)

    def without_padding(self, logits: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        return logits.masked_fill(~self.real_tokens(batch, logits).unsqueeze(-1), -torch.inf)

    def given_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        tokens = logits.shape[1]
        ends = [batch[name].reshape(-1) for name in self.label_names]
        targets = torch.stack(ends, dim=-1)
        if len(targets) != len(logits):
            raise DataError(f"There are {len(targets)} answers for {len(logits)} samples; give one per sample.")
        # As in transformers: positions beyond the text are ignored, and negative ones become 0. Those of padding are
        # beyond the text in a batch without padding.
        targets = targets.clamp_min(0).masked_fill(targets >= tokens, IGNORED)
        padding = ~self.real_tokens(batch, logits).gather(1, targets.clamp_min(0))
        return targets.masked_fill(padding, IGNORED)

    def counts(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        if not self.has_labels(batch):
            return None
        tensors = (batch[name] for name in ("input_ids", "inputs_embeds", "attention_mask", "bbox") if name in batch)
        return (self.given_targets(batch, next(tensors)) != IGNORED).sum(0)

    def parts(self, logits: torch.Tensor, targets: torch.Tensor) -> Parts:
        losses = cross_entropies(logits.transpose(1, 2), targets)  # [batch x 2]
        return Parts(losses, (targets != IGNORED).to(losses.dtype))

    def label_probabilities(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().label_probabilities(logits.transpose(1, 2), targets)
