"""headprune: remove attention heads and neurons from transformers, and save smaller, faster models."""

import sys
from typing import TYPE_CHECKING

from headprune.errors import HeadpruneError
from headprune.former_names import FormerModules
from headprune.lazy import lazy

if TYPE_CHECKING:
    from headprune.checkpoint.quantized import QuantizeResult, quantize
    from headprune.checkpoint.save_load import load, save
    from headprune.criteria import Criterion, criterion
    from headprune.criteria.scoring import ScoreResult, score
    from headprune.data import Columns, Examples, load_examples
    from headprune.exports.export_model import export
    from headprune.measure.evaluation import EvaluateResult
    from headprune.measure.inspection import inspect
    from headprune.models import AllAttentionConfig, AllAttentionForCausalLM
    from headprune.repair.prune_heads import prune_heads
    from headprune.repair.remove import remove
    from headprune.reports.page import report
    from headprune.runs.compare_api import CompareResult, compare
    from headprune.runs.evaluate import evaluate
    from headprune.runs.hub import push_to_hub
    from headprune.search.config import PruneConfig
    from headprune.search.methods import Method, register_method
    from headprune.search.prune_result import PruneResult
    from headprune.search.pruner import Pruner, prune
    from headprune.tasks import Task, task_of
    from headprune.training.config import TrainConfig
    from headprune.training.finetune import FinetuneResult, finetune
    from headprune.training.fixed_gates import Gates, gated
    from headprune.training.gate_callback import GateCallback
    from headprune.training.gate_config import GateConfig
    from headprune.training.learned_gates import LearnedGates
    from headprune.units import Layout, register_family, resolve, survey
    from headprune.vocabulary.shrink import shrink_vocabulary
else:  # the same once more, for importing each of them when it is used: `import headprune` alone takes no time
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "AllAttentionConfig": "headprune.models",
            "AllAttentionForCausalLM": "headprune.models",
            "Columns": "headprune.data",
            "CompareResult": "headprune.runs.compare_api",
            "Criterion": "headprune.criteria",
            "EvaluateResult": "headprune.measure.evaluation",
            "Examples": "headprune.data",
            "GateCallback": "headprune.training.gate_callback",
            "GateConfig": "headprune.training.gate_config",
            "FinetuneResult": "headprune.training.finetune",
            "Gates": "headprune.training.fixed_gates",
            "Layout": "headprune.units",
            "LearnedGates": "headprune.training.learned_gates",
            "Method": "headprune.search.methods",
            "PruneConfig": "headprune.search.config",
            "PruneResult": "headprune.search.prune_result",
            "Pruner": "headprune.search.pruner",
            "QuantizeResult": "headprune.checkpoint.quantized",
            "ScoreResult": "headprune.criteria.scoring",
            "Task": "headprune.tasks",
            "TrainConfig": "headprune.training.config",
            "compare": "headprune.runs.compare_api",
            "criterion": "headprune.criteria",
            "evaluate": "headprune.runs.evaluate",
            "export": "headprune.exports.export_model",
            "finetune": "headprune.training.finetune",
            "gated": "headprune.training.fixed_gates",
            "inspect": "headprune.measure.inspection",
            "load": "headprune.checkpoint.save_load",
            "load_examples": "headprune.data",
            "prune": "headprune.search.pruner",
            "prune_heads": "headprune.repair.prune_heads",
            "push_to_hub": "headprune.runs.hub",
            "quantize": "headprune.checkpoint.quantized",
            "register_family": "headprune.units",
            "register_method": "headprune.search.methods",
            "remove": "headprune.repair.remove",
            "report": "headprune.reports.page",
            "resolve": "headprune.units",
            "survey": "headprune.units",
            "save": "headprune.checkpoint.save_load",
            "score": "headprune.criteria.scoring",
            "shrink_vocabulary": "headprune.vocabulary.shrink",
            "task_of": "headprune.tasks",
        },
    )

sys.meta_path.append(FormerModules())

__version__ = "0.1.0"
__all__ = [
    "AllAttentionConfig",
    "AllAttentionForCausalLM",
    "Columns",
    "CompareResult",
    "Criterion",
    "EvaluateResult",
    "Examples",
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
    "compare",
    "criterion",
    "evaluate",
    "export",
    "finetune",
    "gated",
    "inspect",
    "load",
    "load_examples",
    "prune",
    "prune_heads",
    "push_to_hub",
    "quantize",
    "register_family",
    "register_method",
    "remove",
    "report",
    "resolve",
    "save",
    "score",
    "shrink_vocabulary",
    "survey",
    "task_of",
]
