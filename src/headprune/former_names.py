"""Names that documentation told users to import in an earlier version: each gives that of today, and warns once.

Other names of earlier versions were internal, and are gone.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from headprune.errors import warn_renamed

FORMER_NAMES = {
    "headprune.ranks.alone": "headprune.distributed.local_only",
    "headprune.recovery.fit": "headprune.training.fit",
    "headprune.runs.compare.sweep_alpha": "headprune.runs.alpha.choose_alpha",
    "headprune.runs.journal.Run": "headprune.run_folder.Run",
    "headprune.runs.journal.read_run": "headprune.run_folder.read_run",
    "headprune.runs.studies.asked.study_of": "headprune.runs.studies.spec.study_of",
    "headprune.runs.studies.on_ray.OnRay": "headprune.runs.studies.ray_executor.RayExecutor",
    "headprune.runs.studies.plan.plan_study": "headprune.runs.studies.study_runs.make_groups",
    "headprune.runs.studies.running.OneAfterTheOther": "headprune.runs.studies.run_study.SerialExecutor",
    "headprune.runs.studies.summary.run_study": "headprune.runs.studies.run_study.run_study",
    "headprune.runtimes.gguf.Gguf": "headprune.exports.gguf.Gguf",
    "headprune.task.own_batches": "headprune.tasks.own_batches",
}


def former_names(module: str) -> Callable[[str], Any]:
    """`__getattr__` of a module for the names that it had."""

    def get(name: str) -> Any:
        new = FORMER_NAMES.get(f"{module}.{name}")
        if new is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, _, attribute = new.rpartition(".")
        value = getattr(importlib.import_module(place), attribute)
        setattr(sys.modules[module], name, value)  # importing from a package asks twice
        warn_renamed(f"{module}.{name}", new)
        return value

    return get


class FormerModules(MetaPathFinder, Loader):
    """Finds modules of FORMER_NAMES that are gone, after all other finders."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        gone = any(former.startswith(f"{name}.") for former in FORMER_NAMES)
        return ModuleSpec(name, self, is_package=True) if gone else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = former_names(module.__name__)
