"""What applies the removals of each schedule (`Remover`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headprune.repair.dense_targets import DenseTargets
from headprune.repair.front_to_back import remove_front_to_back
from headprune.repair.remove import remove_from_sites
from headprune.search.layerwise.pruning import LayerwisePruning
from headprune.search.memory import target_bytes
from headprune.search.schedules.schedule import Removal, RunState
from headprune.surgery.remove_units import remove_units

Inputs = Mapping[str, Any]


class RepairedSites:
    """Repairs every site that loses units on its own, from the moments of the model before the removal."""

    def apply(self, run: RunState, removal: Removal, verify: Inputs | None = None) -> Removal:
        repair, changed = run.config.repair, sorted({member.site for member in removal.members})
        repairs = remove_from_sites(
            run.model,
            run.sites,
            removal.members,
            verify=verify,
            repair=repair,
            batches=run.calibration,
            moments=None if repair == "none" else run.scorer.moments(changed),
            task=run.task,
        )
        run.refresh()
        return replace(removal, repairs=repairs, changed=changed)


class RepairedModel:
    """Repairs sites front to back: towards the dense model, so that a later round can correct errors of an earlier one,
    or each towards its outputs before the removal."""

    def __init__(self) -> None:
        self.dense: DenseTargets | None = None

    def apply(self, run: RunState, removal: Removal, verify: Inputs | None = None) -> Removal:
        model, members, repair = run.model, removal.members, run.config.repair
        if repair in ("lstsq", "mean"):
            repairs = remove_front_to_back(model, run.sites, members, run.calibration, run.task, repair, verify)
            run.refresh()
            return replace(removal, repairs=repairs)
        if repair != "none" and self.dense is None:
            weighted = repair == "dense"  # only this repair weights tokens by the logits' sensitivity
            self.dense = DenseTargets(
                model,
                run.sites,
                run.calibration,
                run.task,
                weighted=weighted,
                memory=target_bytes(run.config.memory),
            )
        remove_units(model, members, sites=run.sites, verify=verify)
        run.refresh()
        if self.dense is None:
            return removal
        return replace(removal, repairs=self.dense.repair(model, run.sites, repair))


class RepairedLayers:
    """Prunes and repairs layer after layer, each before the next is reached."""

    def __init__(self, pruning: LayerwisePruning) -> None:
        self.pruning = pruning

    def apply(self, run: RunState, removal: Removal, verify: Inputs | None = None) -> Removal:
        # Removals were verified on a small model of the class (`require_walkable`).
        pruned = self.pruning.prune(removal, run.observers)
        run.refresh()
        return pruned
