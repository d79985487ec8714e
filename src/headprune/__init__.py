"""headprune: find the attention heads that do not matter, and remove them from the weights."""

from headprune.criteria import Criterion, criterion
from headprune.criteria.scoring import ScoreResult, score
from headprune.errors import HeadpruneError
from headprune.hooks.gates import Gates, gated
from headprune.measure.inspection import inspect
from headprune.repair.remove import remove
from headprune.search.config import PruneConfig
from headprune.search.pruner import Pruner, PruneResult, prune
from headprune.store.checkpoint import load, save
from headprune.task import Task, task_of
from headprune.units import Layout, register_family, resolve

__version__ = "0.1.0"
__all__ = [
    "Criterion",
    "Gates",
    "HeadpruneError",
    "Layout",
    "PruneConfig",
    "PruneResult",
    "Pruner",
    "ScoreResult",
    "Task",
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
    "task_of",
]
