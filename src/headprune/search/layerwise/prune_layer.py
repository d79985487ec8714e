"""Prunes one layer: removes units, refits its output maps, and advances the hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from headprune.layerwise.walker import Layer, Walker
from headprune.progress import Phase, report_phase
from headprune.repair.dense_targets import TargetRecorder
from headprune.repair.front_to_back import Target, remove_from_site, repair_front_to_back
from headprune.repair.regression import DENSE_RIDGES, FEW_RIDGES, SITE_RIDGES, Repair, RepairKind
from headprune.search.config import PruneConfig
from headprune.search.layerwise.choose import choose_units, precision_for
from headprune.surgery.remove_units import remove_units
from headprune.units import Member, Site, sites_of


@dataclass(frozen=True)
class PrunedLayer:
    """The removals and repairs of one layer."""

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
    chosen: Mapping[int, Sequence[Member]] = field(default_factory=dict)  # members to remove, where they are known
    scratch: Path | None = None
    sites: Sequence[Site] = field(default=(), init=False)

    def prune(self, layer: Layer) -> PrunedLayer:
        """Prune and repair this layer, and advance the hidden states of the dense model; those of the pruned one follow
        when the layer is written."""
        targets = self._dense_pass(layer)
        self.sites = sites_of(self.model, self.config.units)  # since the last layer, others may have been restored
        removed: list[Member] = []
        repairs: list[Repair] = []
        for index, target in targets.items():
            leaving, repair = self._site(index, target)
            removed += leaving
            # Without the weights, which the layer has: those of all layers would be as large as the model.
            repairs += [replace(each, weight=None, bias=None) for each in repair]
        for target in targets.values():
            for stored in (target.outputs, target.streams):
                if stored is not None:
                    stored.clear()
        return PrunedLayer(layer.path, tuple(removed), tuple(repairs))

    def _site(self, index: int, target: Target) -> tuple[list[Member], list[Repair]]:
        site, kind = self.sites[index], self.config.repair
        if index in self.chosen:
            leaving = list(self.chosen[index])
        else:
            report_phase(Phase(f"choosing units of {site.path}"))
            count = len(site.units()) - self.widths.get(index, len(site.units()))
            leaving = choose_units(self.config.criterion, self.model, self.sites, site, self.walker, count)
        if kind in ("lstsq", "mean"):  # towards the outputs that the site had, so the repair reads what leaves
            repairs = [self._remove_with_repair(index, leaving, kind)] if leaving else []
            self._refresh(leaving)
            return leaving, repairs
        remove_units(self.model, leaving, sites=self.sites)
        self._refresh(leaving)
        precision = precision_for(self.sites[index])
        ridges = DENSE_RIDGES if precision == torch.float64 else FEW_RIDGES
        return leaving, repair_front_to_back(
            self.model, self.sites, {index: target}, self.walker, kind, ridges=ridges, precision=precision
        )

    def _refresh(self, removed: Sequence[Member]) -> None:
        if removed:
            self.sites = sites_of(self.model, self.config.units)

    def _remove_with_repair(self, index: int, leaving: Sequence[Member], kind: RepairKind) -> Repair:
        precision = precision_for(self.sites[index])
        ridges = SITE_RIDGES if precision == torch.float64 else FEW_RIDGES
        return remove_from_site(
            self.model, self.sites, index, leaving, self.walker, kind, ridges=ridges, precision=precision
        )

    def _dense_pass(self, layer: Layer) -> dict[int, Target]:
        """The targets of all sites of the layer in the order in which they run, from the pass that advances the hidden
        states of the dense model."""
        walker = self.walker
        recorder = TargetRecorder(walker.task, kept=self.config.repair in ("dense", "scale"), scratch=self.scratch)
        with recorder.watching(self.model, [site for site in layer.sites if site.kept]):
            walker.advance(
                layer,
                "dense",
                before=lambda number: recorder.begin(walker.prepared(number) if number < walker.calibration else None),
                after=lambda number, hidden: recorder.end(number),
                phase="running the dense",
            )
        return recorder.targets
