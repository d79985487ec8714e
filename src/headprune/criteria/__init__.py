"""From signals to a score per unit: one method per file, registered when the room is imported.

A criterion computes from sums over samples or from the tokens of a site; `scoring_pass.py` reads the data for all of
them. torch is imported when one of them computes."""

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
