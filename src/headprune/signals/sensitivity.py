"""The effect of a change of a site's outputs on the logits, by the gradients there, token by token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headprune.batches import widened
from headprune.signals.moments import FOLDS
from headprune.signals.tokens import Tokens

FLOOR = 0.1  # weight of a token with gradient zero, relative to one with the average gradient


@dataclass
class Sensitivity:
    """Real tokens of all the data at one site."""

    inputs: torch.Tensor  # [tokens x in]
    gradients: list[torch.Tensor]  # per draw [tokens x out]; empty without gradients
    samples: torch.Tensor  # [tokens]: the sample of each
    folds: torch.Tensor  # [tokens]: the fold of its sample, for errors on held-out samples

    @classmethod
    def of(cls, tokens: Tokens) -> Sensitivity:
        applications = tokens.applications
        samples = torch.cat([application.samples for application in applications])
        return cls(
            torch.cat([widened(application.inputs) for application in applications]),
            [
                torch.cat([widened(application.output_gradients[draw]) for application in applications])
                for draw in range(len(applications[0].output_gradients))
            ],
            samples,
            tokens.folds()[samples] if tokens.keys else samples % FOLDS,
        )

    @property
    def weights(self) -> torch.Tensor:
        """The weight of each token."""
        if not self.gradients:
            return self.inputs.new_ones(len(self.inputs))
        return token_weights(sum(gradient.square().sum(1) for gradient in self.gradients))  # type: ignore[arg-type]

    def metric(self, across: int) -> torch.Tensor:
        """E[g g^T], the metric for errors of the output; the identity without gradients."""
        if not self.gradients:
            return torch.eye(across, dtype=torch.float64)
        products = sum(gradient.t() @ gradient for gradient in self.gradients)
        return products.double() / max(len(self.inputs) * len(self.gradients), 1)  # type: ignore[union-attr]

    def effect(self, change: torch.Tensor) -> float:
        """The mean over samples of the squared effect on the logits, when the outputs change by `change`, [tokens x
        out]."""
        count = int(self.samples.max()) + 1 if len(self.samples) else 1
        total = 0.0
        for gradient in self.gradients:
            effects = torch.zeros(count, dtype=torch.float64).index_add_(
                0, self.samples, (gradient * change).sum(1, dtype=torch.float64)
            )
            total += float(effects.square().sum())
        return total / max(len(self.gradients), 1) / count


def token_weights(squares: torch.Tensor, mean: torch.Tensor | None = None) -> torch.Tensor:
    """Weights of tokens by how much the logits depend on them, from squared gradients and their mean over all tokens;
    by the root, so that a few tokens do not dominate."""
    mean = squares.double().mean() if mean is None else mean
    if not (torch.isfinite(mean) and mean > 0):
        return torch.ones_like(squares)
    return ((squares.double() / mean).sqrt() + FLOOR).to(squares)
