"""Applying a removal: units leave the weights, and what stays is repaired as the schedule of the run asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from headprune.repair.dense_targets import DenseTargets
from headprune.repair.front_to_back import remove_front_to_back
from headprune.repair.remove import remove_and_repair
from headprune.search.schedules.layerwise import prune_layers
from headprune.search.schedules.schedule import Removal, RunState
from headprune.surgery.remove_units import remove_units
from headprune.units import sites_of

Inputs = Mapping[str, Any]


class Remover(Protocol):
    def apply(self, run: RunState, removal: Removal, verify: Inputs | None = None) -> Removal:
        """Change the model, and return the removal with what was done; `verify` masked == removed on these inputs."""


class RepairedSites:
    """Every site that loses units is repaired by itself, from the moments of the model before they go."""

    def apply(self, run: RunState, removal: Removal, verify: Inputs | None = None) -> Removal:
        repair, changed = run.config.repair, sorted({member.site for member in removal.members})
        repairs = remove_and_repair(
            run.model,
            run.sites,
            removal.members,
            verify=verify,
            repair=repair,
            batches=run.calibration,
            moments=None if repair == "none" else run.scorer.moments(changed),
            task=run.task,
        )
        return replace(removal, repairs=repairs, changed=changed)


class RepairedModel:
    """Sites are repaired front to back: towards the dense model, so that what one round gets wrong the next can still
    make good, or each towards what it gave."""

    def __init__(self) -> None:
        self.dense: DenseTargets | None = None

    def apply(self, run: RunState, removal: Removal, verify: Inputs | None = None) -> Removal:
        model, members, repair = run.model, removal.members, run.config.repair
        if repair in ("lstsq", "mean"):
            repairs = remove_front_to_back(model, run.sites, members, run.calibration, run.task, repair, verify)
            return replace(removal, repairs=repairs)
        if repair != "none" and self.dense is None:
            weighted = repair == "dense"  # ours alone asks which tokens the logits depend on
            self.dense = DenseTargets(model, run.sites, run.calibration, run.task, weighted=weighted)
        remove_units(model, members, sites=run.sites, verify=verify)
        if self.dense is None:
            return removal
        return replace(removal, repairs=self.dense.repair(model, sites_of(model, run.config.units), repair))


class RepairedLayers:
    """Layer after layer, each before the next is reached."""

    def apply(self, run: RunState, removal: Removal, verify: Inputs | None = None) -> Removal:
        return prune_layers(run, removal)


def remover_for(schedule: str) -> Remover:
    removers: dict[str, type[Remover]] = {"rounds": RepairedModel, "layerwise": RepairedLayers}
    return removers.get(schedule, RepairedSites)()
