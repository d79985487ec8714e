"""All that leaves leaves in one step, layer after layer: the schedule says how many units every site keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from headprune import distributed
from headprune.errors import ScheduleError
from headprune.hooks.offload import input_device
from headprune.search.layerwise.prune_layer import PrunedLayer
from headprune.search.layerwise.pruning import LayerwisePruning
from headprune.search.schedules.schedule import Removal, RunState
from headprune.search.stopwatch import Stopwatch


class Layerwise:
    """One removal; which units of a layer leave is decided when it is reached."""

    watch: Stopwatch | None = None

    def __init__(self, run: RunState) -> None:
        if distributed.is_distributed():
            raise ScheduleError(
                "The layer-wise schedule runs in one process; prune outside of the group, or use another."
            )
        self.budget = pruning_of(run).budget
        self.measure = self.budget.measure
        self.points: Mapping[int, str] = {}

    def rule(self, run: RunState) -> str:
        return self.budget.rule() if run.config.budget is not None and len(run.steps) > 1 else ""

    def removals(self, run: RunState) -> Iterator[Removal]:
        if len(run.steps) == 1:
            yield Removal(widths=pruning_of(run).widths())


def pruning_of(run: RunState) -> LayerwisePruning:
    return LayerwisePruning(run.model, run.calibration, run.config, run.task, device=input_device(run.model))


def prune_layers(run: RunState, removal: Removal) -> Removal:
    """Go through the layers: units leave each, by its widths or as was chosen, and what stays is repaired."""
    return removal_of(list(pruning_of(run).layers(removal.widths or {}, removal.members)))


def removal_of(layers: Sequence[PrunedLayer]) -> Removal:
    """What was done to all layers, as one removal."""
    members = sorted(member for layer in layers for member in layer.removed)
    return Removal(tuple(members), repairs=[repair for layer in layers for repair in layer.repairs])
