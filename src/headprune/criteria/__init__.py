"""One paper per file. Importing the package registers them all; torch is imported when one of them computes."""

from headprune.criteria import (  # noqa: F401
    attribution,
    elimination,
    entropy,
    fisher,
    fluctuation,
    gnorm,
    hies,
    his,
    magnitude,
    random,
    residual,
    taylor,
    wanda,
)
from headprune.criteria.registry import REGISTRY, Criterion, Inverted, criterion, make

__all__ = ["REGISTRY", "Criterion", "Inverted", "criterion", "make"]
