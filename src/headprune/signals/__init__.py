"""What criteria are made of: one instrumented forward, and the backward passes that were asked for, per batch."""

from headprune.signals.observe import Observation, observe
from headprune.signals.requests import (
    Attribution,
    BlockNorms,
    Entropy,
    GateGradients,
    Request,
    ResidualErrors,
    ResidualGradients,
    WeightProducts,
    ZeroProbabilities,
)

__all__ = [
    "Attribution",
    "BlockNorms",
    "Entropy",
    "GateGradients",
    "Observation",
    "Request",
    "ResidualErrors",
    "ResidualGradients",
    "WeightProducts",
    "ZeroProbabilities",
    "observe",
]
