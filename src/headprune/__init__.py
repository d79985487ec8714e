"""headprune: find the attention heads that do not matter, and remove them from the weights."""

from typing import TYPE_CHECKING

from headprune.errors import HeadpruneError
from headprune.late import late

if TYPE_CHECKING:
    from headprune.criteria import Criterion, criterion
    from headprune.criteria.scoring import ScoreResult, score
    from headprune.hooks.watch import gated
    from headprune.measure.inspection import inspect
    from headprune.search.pruner import PruneResult, prune
    from headprune.store.checkpoint import load, save
    from headprune.surgery.cut import remove
    from headprune.units import Layout, register_family, resolve
else:  # the same once more, for importing each of them when it is used: `import headprune` alone takes no time
    __getattr__, __dir__ = late(
        __name__,
        {
            "Criterion": "headprune.criteria",
            "Layout": "headprune.units",
            "PruneResult": "headprune.search.pruner",
            "ScoreResult": "headprune.criteria.scoring",
            "criterion": "headprune.criteria",
            "gated": "headprune.hooks.watch",
            "inspect": "headprune.measure.inspection",
            "load": "headprune.store.checkpoint",
            "prune": "headprune.search.pruner",
            "register_family": "headprune.units",
            "remove": "headprune.surgery.cut",
            "resolve": "headprune.units",
            "save": "headprune.store.checkpoint",
            "score": "headprune.criteria.scoring",
        },
    )

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
