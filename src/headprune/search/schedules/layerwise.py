"""The layer-wise schedule: one step that goes through the layers; it decides how many units every site keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headprune import distributed
from headprune.errors import ScheduleError
from headprune.hooks.offload import input_device
from headprune.search.layerwise.pruning import LayerwisePruning
from headprune.search.removers import RepairedLayers
from headprune.search.schedules.schedule import Removal, Remover, RunState
from headprune.search.stopwatch import Stopwatch


class Layerwise:
    """One removal; the units of a layer are chosen when the layer is reached."""

    stopwatch: Stopwatch | None = None

    def __init__(self, run: RunState) -> None:
        if distributed.is_distributed():
            raise ScheduleError(
                "The layer-wise schedule runs in one process; prune outside of the group, or use another."
            )
        self.pruning = LayerwisePruning(
            run.model,
            run.calibration,
            run.config,
            run.task,
            device=input_device(run.model),
            unreached=run.candidates.unreached,
        )
        self.budget = self.pruning.budget
        self.measure = self.budget.measure
        self.points: Mapping[int, str] = {}

    def remover(self) -> Remover:
        return RepairedLayers(self.pruning)

    def rule(self, run: RunState) -> str:
        return self.budget.rule() if run.config.budget is not None and len(run.steps) > 1 else ""

    def removals(self, run: RunState) -> Iterator[Removal]:
        if len(run.steps) == 1:
            yield Removal(widths=self.pruning.widths())
