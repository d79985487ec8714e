"""A sweep over a model that is in memory, as one step of a run."""

from __future__ import annotations

from collections.abc import Sequence

from headprune import distributed
from headprune.errors import ScheduleError
from headprune.measure.trajectory import Step
from headprune.search.replay import check_replay
from headprune.search.sweep.sweep import Sweep
from headprune.search.ways import Subject, Taken
from headprune.units import Member
from headprune.units.offload import input_device


class InOneSweep:
    """All that leaves leaves in one step, layer after layer."""

    def __init__(self, run: Subject) -> None:
        if distributed.is_distributed():
            raise ScheduleError("A sweep runs in one process; prune outside of the group, or use another schedule.")
        self.run = run
        self.budget = self._sweep().budget

    def _sweep(self) -> Sweep:
        run = self.run
        return Sweep(run.model, run.calibration, run.config, run.task, device=input_device(run.model))

    def goes_on(self) -> bool:
        return len(self.run.steps) == 1

    def take(self) -> Taken:
        sweep = self._sweep()
        return self._taken(sweep, sweep.widths(), ())

    def _taken(self, sweep: Sweep, keep: dict[int, int], chosen: Sequence[Member]) -> Taken:
        swept = list(sweep.layers(keep, chosen=chosen))
        removed = tuple(sorted(member for layer in swept for member in layer.removed))
        return Taken(removed, None, None, [repair for layer in swept for repair in layer.repairs], 0.0, None)

    def replay(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if step.step:
                check_replay(step, self._taken(self._sweep(), {}, step.removed).repairs)

    def left(self, step: Step) -> int:
        if self.budget.measure == "units":
            return step.left
        return step.parameters if self.budget.measure in ("parameters", "memory") else step.flops

    def rule(self) -> str:
        return self.budget.rule() if self.run.config.budget is not None else ""

    def point(self, step: int) -> float | None:
        return None
