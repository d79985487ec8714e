"""What it costs when the outputs of a site change: by the gradients of the logits there, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headprune.batches import widened
from headprune.signals.tokens import Tokens

FLOOR = 0.1  # weight of a token that nothing depends on, relative to one that is sensitive on average


@dataclass
class Sensitivity:
    """Real tokens of all the data at one site."""

    inputs: torch.Tensor  # [tokens x in]
    gradients: list[torch.Tensor]  # per draw [tokens x out]; none where no gradient was asked for
    samples: torch.Tensor  # [tokens]: the sample of each

    @classmethod
    def of(cls, tokens: Tokens) -> Sensitivity:
        seen = tokens.applications
        return cls(
            torch.cat([widened(own.inputs) for own in seen]),
            [
                torch.cat([widened(own.output_gradients[draw]) for own in seen])
                for draw in range(len(seen[0].output_gradients))
            ],
            torch.cat([own.samples for own in seen]),
        )

    @property
    def weights(self) -> torch.Tensor:
        """How much each token counts."""
        if not self.gradients:
            return self.inputs.new_ones(len(self.inputs))
        return token_weights(sum(own.square().sum(1) for own in self.gradients))  # type: ignore[arg-type]

    def metric(self, across: int) -> torch.Tensor:
        """E[g g^T], by which errors of the output are measured; as they are where there is no gradient."""
        if not self.gradients:
            return torch.eye(across, dtype=torch.float64)
        products = sum(own.t() @ own for own in self.gradients)
        return products.double() / max(len(self.inputs) * len(self.gradients), 1)  # type: ignore[union-attr]

    def effect(self, change: torch.Tensor) -> float:
        """The mean over samples of the squared effect on the logits, when the outputs change so, [tokens x out]."""
        count = int(self.samples.max()) + 1 if len(self.samples) else 1
        total = 0.0
        for own in self.gradients:
            pulled = torch.zeros(count, dtype=torch.float64).index_add_(
                0, self.samples, (own * change).sum(1, dtype=torch.float64)
            )
            total += float(pulled.square().sum())
        return total / max(len(self.gradients), 1) / count


def token_weights(squares: torch.Tensor, mean: torch.Tensor | None = None) -> torch.Tensor:
    """Tokens by how much the logits depend on them, from squared gradients and their mean over all tokens;
    by the root, so that a few do not drown all others."""
    mean = squares.double().mean() if mean is None else mean
    if not (torch.isfinite(mean) and mean > 0):
        return torch.ones_like(squares)
    return ((squares.double() / mean).sqrt() + FLOOR).to(squares)
