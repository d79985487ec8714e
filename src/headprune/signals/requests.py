"""What a criterion can ask of a pass. A request is a value: criteria that ask for the same share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Objective = Literal["logit-norm", "loss", "logit-signs"]
Aggregation = Literal["sample", "batch"]


@dataclass(frozen=True)
class Request:
    """Answered by a tensor [batch x sites x heads] in original head ids, NaN at heads that are gone."""


@dataclass(frozen=True)
class GradientRequest(Request):
    """Needs a backward pass of the objective; requests with the same objective and aggregation share it."""

    objective: Objective = "loss"
    aggregation: Aggregation = "sample"

    @property
    def backward(self) -> tuple[Objective, Aggregation]:
        return self.objective, self.aggregation


@dataclass(frozen=True)
class GateGradients(GradientRequest):
    """<Z, dL/dZ>: the gradient at a gate of value 1 on the output of each head, one per sample."""


@dataclass(frozen=True)
class ResidualGradients(GradientRequest):
    """<R, dL/dZ>: as GateGradients, with R the part of each unit's output that the others at its site cannot express.

    R is linear in the outputs of all heads; the pass must know how (`signals.residuals`).
    """

    objective: Objective = "logit-signs"


@dataclass(frozen=True)
class ResidualErrors(Request):
    """|W R|^2 over each sample's tokens, R as in ResidualGradients and W the unit's part of the output projection,
    relative to |x|^2, x the residual stream after the site's layer."""


@dataclass(frozen=True)
class BlockNorms(GradientRequest):
    """Frobenius norms of the gradient of each head's Q, K and V weights: [3 x batch x sites x heads].

    With aggregation `batch` it is the gradient of one scalar for the whole batch, and the batch axis has length 1.
    """

    objective: Objective = "logit-norm"


@dataclass(frozen=True)
class WeightProducts(GradientRequest):
    """<W, dL/dW> summed over each head's Q, K and V weights, one per sample."""


@dataclass(frozen=True)
class Entropy(Request):
    """Mean entropy of the attention rows of each sample's real tokens; variants as in METHODS of arXiv 2602.04491."""

    variant: Literal["A", "B", "C"] = "C"
    epsilon: float = 1e-7


@dataclass(frozen=True)
class EntropyDeficit(Entropy):
    """1 - entropy / log(t) of each sample of t tokens; a sample of one token has no deficit."""


@dataclass(frozen=True)
class ZeroProbabilities(Request):
    """How many probabilities of each sample are exactly 0, where a plain a*log(a) gives NaN."""


@dataclass(frozen=True)
class Attribution(Request):
    """Largest self-attention attribution of each sample (Hao et al. 2021), integrated in `steps` steps per site."""

    steps: int = 20
