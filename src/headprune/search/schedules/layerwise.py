"""The layer-wise schedule: one step that goes through the layers; it decides how many units every site keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from headprune import distributed
from headprune.errors import ScheduleError
from headprune.hooks.offload import input_device
from headprune.layerwise.walker import layers_of
from headprune.search.layerwise.prune_layer import PrunedLayer
from headprune.search.layerwise.pruning import LayerwisePruning
from headprune.search.schedules.schedule import Removal, RunState
from headprune.search.stopwatch import Stopwatch


class Layerwise:
    """One removal; the units of a layer are chosen when the layer is reached."""

    stopwatch: Stopwatch | None = None

    def __init__(self, run: RunState) -> None:
        if distributed.is_distributed():
            raise ScheduleError(
                "The layer-wise schedule runs in one process; prune outside of the group, or use another."
            )
        self.budget = layerwise_pruning(run).budget
        self.measure = self.budget.measure
        self.points: Mapping[int, str] = {}

    def rule(self, run: RunState) -> str:
        return self.budget.rule() if run.config.budget is not None and len(run.steps) > 1 else ""

    def removals(self, run: RunState) -> Iterator[Removal]:
        if len(run.steps) == 1:
            yield Removal(widths=layerwise_pruning(run).widths())


def layerwise_pruning(run: RunState) -> LayerwisePruning:
    return LayerwisePruning(
        run.model,
        run.calibration,
        run.config,
        run.task,
        device=input_device(run.model),
        unreached=run.candidates.unreached,
    )


def prune_layers(run: RunState, removal: Removal) -> Removal:
    """Prune and repair layer after layer, to these widths or by these members."""
    count = len(layers_of(run.model, run.sites))
    pruned: list[PrunedLayer] = []
    for layer in layerwise_pruning(run).layers(removal.widths or {}, removal.members):
        pruned.append(layer)
        for observer in run.observers:
            observer.layer(len(pruned), count, layer)
    return removal_of(pruned)


def removal_of(layers: Sequence[PrunedLayer]) -> Removal:
    """The removals and repairs of all layers as one removal."""
    members = sorted(member for layer in layers for member in layer.removed)
    return Removal(tuple(members), repairs=[repair for layer in layers for repair in layer.repairs])
