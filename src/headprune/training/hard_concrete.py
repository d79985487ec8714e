"""The hard-concrete distribution (Louizos 2018): a gate that is exactly 0 or exactly 1 with a probability that has a
gradient. A sigmoid of logistic noise, stretched beyond [0, 1] and clamped to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from headprune.errors import GateError

THRESHOLD = 0.5  # of a straight-through gate: open above it
EDGE = 1e-6  # noise stays this far from 0 and 1, where its logarithm ends


@dataclass(frozen=True)
class HardConcrete:
    """Its constants: temperature, and how far it is stretched to either side."""

    beta: float = 1 / 3
    gamma: float = -0.1
    zeta: float = 1.1

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise GateError(f"The temperature beta of a gate must be above 0, but it is {self.beta}.")
        if not (self.gamma < 0 and self.zeta > 1):
            raise GateError(
                f"A gate is stretched from gamma below 0 to zeta above 1, not from {self.gamma} to {self.zeta}; the "
                "paper has -0.1 and 1.1."
            )

    def draw(self, log_alpha: torch.Tensor, noise: torch.Tensor, *, straight_through: bool) -> torch.Tensor:
        """Gates from uniform `noise`; straight-through ones are 0 or 1 with the gradient of what they round."""
        soft = self.stretched(torch.sigmoid((torch.logit(noise, eps=EDGE) + log_alpha) / self.beta))
        if not straight_through:
            return soft
        return (soft > THRESHOLD).to(soft) + (soft - soft.detach())

    def stretched(self, concrete: torch.Tensor) -> torch.Tensor:
        return (concrete * (self.zeta - self.gamma) + self.gamma).clamp(0.0, 1.0)

    def evaluated(self, log_alpha: torch.Tensor) -> torch.Tensor:
        """The gate without noise."""
        return self.stretched(torch.sigmoid(log_alpha))

    def open_probability(self, log_alpha: torch.Tensor) -> torch.Tensor:
        """The probability that a drawn gate is not 0: the expected L0 norm."""
        return torch.sigmoid(log_alpha + self.offset)

    @property
    def offset(self) -> float:
        """log alpha at which a gate is as likely to be 0 as not, with its sign turned."""
        return -self.beta * math.log(-self.gamma / self.zeta)
