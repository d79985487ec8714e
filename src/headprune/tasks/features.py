"""Tasks of models without a head: their outputs are compared with those of the dense model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from headprune.batches import widened
from headprune.errors import DataError
from headprune.tasks.spec import task
from headprune.tasks.tokens import PerToken


@task
class Features(PerToken):
    """Hidden states or embeddings: sentence encoders, towers, backbones. There are no labels."""

    name = "features"
    pipeline_tag = "feature-extraction"
    title = "Models without a head: sentence encoders, towers, backbones"
    data = "text or images; no labels"
    label_names = ()
    classes = False

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("fidelity",)

    def has_labels(self, batch: Mapping[str, Any]) -> bool:
        return False

    def counts(self, batch: Mapping[str, Any]) -> torch.Tensor | None:
        return None

    def inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in super().inputs(batch).items() if name != "labels"}

    def logits(self, output: Any) -> torch.Tensor:
        """The projected embedding of the model, or its hidden states, or its first floating-point output."""
        for name in ("text_embeds", "image_embeds", "last_hidden_state", "logits"):
            value = getattr(output, name, None)
            if isinstance(value, torch.Tensor):
                return value
        values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
        for value in (output, *values):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2:
                return value
        raise DataError(
            f"{type(output).__name__} has no floating-point tensor per sample, so it cannot be scored; use another "
            "model."
        )

    def embeddings(self, output: Any, batch: Mapping[str, Any]) -> torch.Tensor | None:
        """The mean over the tokens of a sample without padding, as for sentence encoders."""
        values = widened(self.logits(output).detach())
        if values.dim() == 2:
            return values
        if values.dim() == 3:
            real = self.real_tokens(batch, values).unsqueeze(-1)
            return (values * real).sum(1) / real.sum(1).clamp_min(1)
        return values.flatten(1)

    def own_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        if logits.dim() != 3:
            raise DataError(
                'A model without a head predicts no labels, so labels="self" has none; use a criterion without a loss.'
            )
        return super().own_targets(batch, logits)


@task
class Similarity(Features):
    """A dual encoder compares every image with every text of the batch; a sample is one pair."""

    name = "similarity"
    pipeline_tag = "zero-shot-image-classification"
    title = "Dual encoders (CLIP, SigLIP)"
    data = "batches with pixel values and token ids, from Python"

    def logits(self, output: Any) -> torch.Tensor:
        pairs = getattr(output, "logits_per_image", None)
        if not isinstance(pairs, torch.Tensor):
            return super().logits(output)
        return pairs.diagonal().unsqueeze(-1)

    def embeddings(self, output: Any, batch: Mapping[str, Any]) -> torch.Tensor | None:
        both = [getattr(output, name, None) for name in ("image_embeds", "text_embeds")]
        if not all(isinstance(part, torch.Tensor) for part in both):
            return super().embeddings(output, batch)
        # The cosine of two such rows is the mean of the cosines of their halves.
        return torch.cat([functional.normalize(part.detach().float(), dim=-1) for part in both], dim=-1)  # type: ignore[union-attr]

    def own_targets(self, batch: Mapping[str, Any], logits: torch.Tensor) -> torch.Tensor:
        raise DataError('A dual encoder predicts no labels, so labels="self" has none; use a criterion without a loss.')
