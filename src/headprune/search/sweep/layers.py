"""What is done with each layer: its units leave, its output maps are solved again, and the batches move on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.criteria import Criterion
from headprune.hooks.attach import hooks
from headprune.hooks.outputs import evaluating
from headprune.hooks.streams import streams
from headprune.repair.solve import Compensation, Repair
from headprune.repair.sweep import Target
from headprune.repair.sweep import sweep as repair_sites
from headprune.repair.towards import RIDGES
from headprune.search.sweep.follow import Follower, Layer, LayerPasses
from headprune.search.sweep.leaving import leaving, precision_for
from headprune.search.sweep.streams import Kept
from headprune.signals.moments import real_outputs
from headprune.signals.spec import is_expert
from headprune.surgery.cut import cut
from headprune.tasks import Task
from headprune.units import Kind, Member, Site, sites_of

FEW_RIDGES = (1e-3, 1e-2, 0.1, 1.0)  # to choose from at wide sites, where each costs a factorisation of its own


@dataclass(frozen=True)
class Swept:
    """What happened at one layer."""

    layer: str
    removed: tuple[Member, ...]
    repairs: tuple[Repair, ...] = ()


@dataclass
class Turn:
    """Prunes one layer after the other."""

    model: PreTrainedModel
    follower: Follower
    criterion: Criterion
    compensate: Compensation
    kinds: Sequence[Kind]
    keep: Mapping[int, int]  # site -> units
    chosen: Mapping[int, Sequence[Member]] = field(default_factory=dict)  # where it is known who leaves
    scratch: Path | None = None

    def take(self, layer: Layer) -> Swept:
        """Prune and repair this layer, and take the dense stream past it; the pruned one comes when it is written."""
        wanted = self._dense_pass(layer)
        removed: list[Member] = []
        repairs: list[Repair] = []
        for index, target in wanted.items():
            gone, repair = self._site(layer, index, target)
            removed += gone
            # Without the weights, which the layer has: those of all layers would be the model again.
            repairs += [replace(own, weight=None, bias=None) for own in repair]
        for target in wanted.values():
            for kept in (target.outputs, target.streams):
                if isinstance(kept, Kept):
                    kept.clear()
        return Swept(layer.path, tuple(removed), tuple(repairs))

    def _site(self, layer: Layer, index: int, target: Target) -> tuple[list[Member], list[Repair]]:
        sites = sites_of(self.model, self.kinds)
        site = sites[index]
        passes = LayerPasses(self.follower, layer)
        if index in self.chosen:
            gone = list(self.chosen[index])
        else:
            count = len(site.units()) - self.keep.get(index, len(site.units()))
            gone = leaving(self.criterion, self.model, sites, site, passes, count)
        if self.compensate == "site":
            target = self._own_target(layer, site)
        if gone:
            cut(self.model, gone)
        sites = sites_of(self.model, self.kinds)
        precision = precision_for(sites[index])
        ridges = RIDGES if precision == torch.float64 else FEW_RIDGES
        how: Compensation = "lstsq" if self.compensate == "site" else self.compensate
        if self.compensate == "site" and not gone:
            return gone, []
        return gone, repair_sites(self.model, sites, {index: target}, passes, how, ridges=ridges, precision=precision)

    def _own_target(self, layer: Layer, site: Site) -> Target:
        """What the whole site gives on what reaches it now."""
        outputs = Kept(self.scratch, f"own-{site.index}")
        weight: Any = self.model.get_submodule(site.o)
        with torch.no_grad():
            for seen in LayerPasses(self.follower, layer).at(site):
                outputs.append(weight(seen.columns).cpu())
        return Target(outputs, None, None)

    def _dense_pass(self, layer: Layer) -> dict[int, Target]:
        """The targets of all sites of the layer in the order in which they run, from the pass that takes the dense
        stream past it."""
        follower = self.follower
        wanted: dict[int, Target] = {}
        towards = self.compensate in ("lstsq", "scale", "mean")
        sites = [site for site in layer.sites if site.kept]
        watch = _Watch(follower.task, self.scratch, wanted, keep=towards)
        pairs = [(self.model.get_submodule(site.o), watch.output(site)) for site in sites]

        def before(number: int) -> None:
            watch.batch = follower.prepared(number) if number < follower.calibration else None

        with torch.no_grad(), evaluating(self.model), hooks(pairs), streams(self.model, sites, watch.stream):
            follower.advance(layer, "dense", before=before)
        for target in wanted.values():
            if target.streams is not None and len(target.streams) != len(target.outputs):
                target.streams = None  # what a site gives is not simply added to the stream
        return wanted


class _Watch:
    """Keeps what the sites of a layer give in the dense model, and what that is added to."""

    def __init__(self, task: Task, scratch: Path | None, wanted: dict[int, Target], *, keep: bool) -> None:
        self.task, self.scratch, self.wanted, self.keep = task, scratch, wanted, keep
        self.batch: Mapping[str, Any] | None = None

    def output(self, site: Site) -> Any:
        def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            if self.batch is None:
                return
            if site.index not in self.wanted:
                kept = [Kept(self.scratch, f"{name}-{site.index}") for name in ("wanted", "stream")]
                self.wanted[site.index] = Target(kept[0], kept[1], None)
            self.wanted[site.index].routed |= is_expert(site) and output.dim() == 2
            if self.keep:
                self.wanted[site.index].outputs.append(real_outputs(site, self.batch, output, self.task)[0].cpu())

        return note

    def stream(self, site: Site, stream: torch.Tensor) -> None:
        if self.batch is not None and self.keep:
            own = self.wanted[site.index].streams
            assert isinstance(own, Kept)
            own.append(real_outputs(site, self.batch, stream, self.task)[0].cpu())
