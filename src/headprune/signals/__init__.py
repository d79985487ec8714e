"""What criteria are made of: one instrumented forward, and the backward passes that were asked for, per batch.

What can be asked for is here; what answers is imported from its module, since it needs torch.
"""

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
    "Request",
    "ResidualErrors",
    "ResidualGradients",
    "WeightProducts",
    "ZeroProbabilities",
]
