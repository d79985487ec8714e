"""What is done with each layer: its units leave, its output maps are solved again, and the batches move on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from headprune.layerwise.walker import Layer, Walker
from headprune.repair.dense_targets import TargetRecorder
from headprune.repair.front_to_back import Target, remove_from_site, repair_front_to_back
from headprune.repair.regression import DENSE_RIDGES, FEW_RIDGES, SITE_RIDGES, Repair
from headprune.search.config import PruneConfig
from headprune.search.layerwise.choose import choose_units, precision_for
from headprune.surgery.remove_units import remove_units
from headprune.units import Member, Site, sites_of


@dataclass(frozen=True)
class PrunedLayer:
    """What happened at one layer."""

    layer: str
    removed: tuple[Member, ...]
    repairs: tuple[Repair, ...] = ()


@dataclass
class LayerPruner:
    """Prunes one layer after the other."""

    model: PreTrainedModel
    walker: Walker
    config: PruneConfig
    widths: Mapping[int, int]  # site -> units that it keeps
    chosen: Mapping[int, Sequence[Member]] = field(default_factory=dict)  # where it is known who leaves
    scratch: Path | None = None

    def prune(self, layer: Layer) -> PrunedLayer:
        """Prune and repair this layer, and take the dense stream past it; the pruned one comes when it is written."""
        wanted = self._dense_pass(layer)
        removed: list[Member] = []
        repairs: list[Repair] = []
        for index, target in wanted.items():
            gone, repair = self._site(index, target)
            removed += gone
            # Without the weights, which the layer has: those of all layers would be the model again.
            repairs += [replace(own, weight=None, bias=None) for own in repair]
        for target in wanted.values():
            for kept in (target.outputs, target.streams):
                if kept is not None:
                    kept.clear()
        return PrunedLayer(layer.path, tuple(removed), tuple(repairs))

    def _site(self, index: int, target: Target) -> tuple[list[Member], list[Repair]]:
        sites = sites_of(self.model, self.config.units)
        site = sites[index]
        if index in self.chosen:
            gone = list(self.chosen[index])
        else:
            count = len(site.units()) - self.widths.get(index, len(site.units()))
            gone = choose_units(self.config.criterion, self.model, sites, site, self.walker, count)
        if self.config.repair in ("lstsq", "mean"):
            return gone, self._removed_by_itself(site, gone)
        if gone:
            remove_units(self.model, gone)
        sites = sites_of(self.model, self.config.units)
        precision = precision_for(sites[index])
        ridges = DENSE_RIDGES if precision == torch.float64 else FEW_RIDGES
        return gone, repair_front_to_back(
            self.model, sites, {index: target}, self.walker, self.config.repair, ridges=ridges, precision=precision
        )

    def _removed_by_itself(self, site: Site, gone: Sequence[Member]) -> list[Repair]:
        """With the site repaired towards what it gave with these members, on what reaches it now."""
        if not gone:
            return []
        precision = precision_for(site)
        ridges = SITE_RIDGES if precision == torch.float64 else FEW_RIDGES
        repair = self.config.repair
        return [remove_from_site(self.model, site, gone, self.walker, repair, ridges=ridges, precision=precision)]

    def _dense_pass(self, layer: Layer) -> dict[int, Target]:
        """The targets of all sites of the layer in the order in which they run, from the pass that takes the dense
        stream past it."""
        walker = self.walker
        recorder = TargetRecorder(walker.task, kept=self.config.repair in ("dense", "scale"), scratch=self.scratch)
        with recorder.watching(self.model, [site for site in layer.sites if site.kept]):
            walker.advance(
                layer,
                "dense",
                before=lambda number: recorder.begin(walker.prepared(number) if number < walker.calibration else None),
                after=lambda number, stream: recorder.end(number),
            )
        return recorder.targets
