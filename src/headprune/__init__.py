"""headprune: find the attention heads that do not matter, and remove them from the weights."""

from headprune.criteria import Criterion, criterion
from headprune.criteria.scoring import ScoreResult, score
from headprune.errors import HeadpruneError
from headprune.hooks.watch import gated
from headprune.measure.inspection import inspect
from headprune.search.pruner import PruneResult, prune
from headprune.store.checkpoint import load, save
from headprune.surgery.cut import remove
from headprune.units import Layout, register_family, resolve

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
