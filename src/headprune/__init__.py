"""headprune: find the attention heads that do not matter, and remove them from the weights."""

from typing import TYPE_CHECKING

from headprune.errors import HeadpruneError
from headprune.lazy import lazy

if TYPE_CHECKING:
    from headprune.criteria import Criterion, criterion
    from headprune.criteria.scoring import ScoreResult, score
    from headprune.gates.callback import GateCallback
    from headprune.gates.config import GateConfig
    from headprune.gates.fixed import Gates, gated
    from headprune.gates.learned import LearnedGates
    from headprune.measure.inspection import inspect
    from headprune.models import AllAttentionConfig, AllAttentionForCausalLM
    from headprune.recovery.config import TrainConfig
    from headprune.recovery.finetune import FinetuneResult, finetune
    from headprune.repair.remove import remove
    from headprune.runs.hub import push_to_hub
    from headprune.runtimes.exporting import export
    from headprune.search.config import PruneConfig
    from headprune.search.methods import Method, register_method
    from headprune.search.pruner import Pruner, PruneResult, prune
    from headprune.store.checkpoint import load, save
    from headprune.store.quantized import QuantizeResult, quantize
    from headprune.tasks import Task, task_of
    from headprune.units import Layout, register_family, resolve
    from headprune.vocabulary.shrink import shrink_vocabulary
else:  # the same once more, for importing each of them when it is used: `import headprune` alone takes no time
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "AllAttentionConfig": "headprune.models",
            "AllAttentionForCausalLM": "headprune.models",
            "Criterion": "headprune.criteria",
            "GateCallback": "headprune.gates.callback",
            "GateConfig": "headprune.gates.config",
            "FinetuneResult": "headprune.recovery.finetune",
            "Gates": "headprune.gates.fixed",
            "Layout": "headprune.units",
            "LearnedGates": "headprune.gates.learned",
            "Method": "headprune.search.methods",
            "PruneConfig": "headprune.search.config",
            "PruneResult": "headprune.search.pruner",
            "Pruner": "headprune.search.pruner",
            "QuantizeResult": "headprune.store.quantized",
            "ScoreResult": "headprune.criteria.scoring",
            "Task": "headprune.tasks",
            "TrainConfig": "headprune.recovery.config",
            "criterion": "headprune.criteria",
            "export": "headprune.runtimes.exporting",
            "finetune": "headprune.recovery.finetune",
            "gated": "headprune.gates.fixed",
            "inspect": "headprune.measure.inspection",
            "load": "headprune.store.checkpoint",
            "prune": "headprune.search.pruner",
            "push_to_hub": "headprune.runs.hub",
            "quantize": "headprune.store.quantized",
            "register_family": "headprune.units",
            "register_method": "headprune.search.methods",
            "remove": "headprune.repair.remove",
            "resolve": "headprune.units",
            "survey": "headprune.units",
            "save": "headprune.store.checkpoint",
            "score": "headprune.criteria.scoring",
            "shrink_vocabulary": "headprune.vocabulary.shrink",
            "task_of": "headprune.tasks",
        },
    )

__version__ = "0.1.0"
__all__ = [
    "AllAttentionConfig",
    "AllAttentionForCausalLM",
    "Criterion",
    "FinetuneResult",
    "GateCallback",
    "GateConfig",
    "Gates",
    "HeadpruneError",
    "Layout",
    "LearnedGates",
    "Method",
    "PruneConfig",
    "PruneResult",
    "Pruner",
    "QuantizeResult",
    "ScoreResult",
    "Task",
    "TrainConfig",
    "criterion",
    "export",
    "finetune",
    "gated",
    "inspect",
    "load",
    "prune",
    "push_to_hub",
    "quantize",
    "register_family",
    "register_method",
    "remove",
    "resolve",
    "save",
    "score",
    "shrink_vocabulary",
    "survey",
    "task_of",
]
