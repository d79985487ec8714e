"""headprune: find the attention heads that do not matter, and remove them from the weights."""

from headprune.checkpoint import load, save
from headprune.criteria import Criterion, criterion
from headprune.errors import HeadpruneError
from headprune.inspection import inspect
from headprune.instrument import gated
from headprune.prune import PruneResult, prune
from headprune.score import ScoreResult, score
from headprune.sites import Layout, register_family, resolve
from headprune.surgery import remove

__version__ = "0.1.0"
__all__ = [
    "Criterion",
    "HeadpruneError",
    "Layout",
    "PruneResult",
    "ScoreResult",
    "criterion",
    "gated",
    "inspect",
    "load",
    "prune",
    "register_family",
    "remove",
    "resolve",
    "save",
    "score",
]
