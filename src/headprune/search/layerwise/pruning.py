"""Pruning a model layer after layer, in memory or on disk: widths first, then the layers, and what comes out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from headprune.errors import ScheduleError, UnsupportedModelError
from headprune.hooks.calls import UnfollowableError
from headprune.hooks.logits import forward
from headprune.layerwise.check import require_walkable
from headprune.layerwise.walker import InMemory, LayerWeights, Walker, Which
from headprune.measure.evaluator import add_output
from headprune.measure.quality import Quality
from headprune.search.budget import Budget, budget_of, check_reachable, prices
from headprune.search.config import PruneConfig
from headprune.search.layerwise.choose import check_local
from headprune.search.layerwise.prune_layer import LayerPruner, PrunedLayer
from headprune.search.layerwise.widths import errors_of, widths
from headprune.search.selection import least_units
from headprune.tasks import Task, rows_of
from headprune.units import Member, Site, by_site, sites_of

IDLE = "it does not run on the calibration data"
log = logging.getLogger(__name__)


class LayerStorage(LayerWeights, Protocol):
    """Where layers are, and what an earlier process has done to them."""

    @property
    def known(self) -> Mapping[str, PrunedLayer]:
        """What was done, by the paths of layers."""

    def restore(self, pruned: PrunedLayer) -> None:
        """The layer, which is dense, becomes what it became then."""

    def keep(self, pruned: PrunedLayer) -> None:
        """The layer is as it stays."""


class EverythingInMemory(InMemory):
    """Nothing has to be fetched, and nothing is kept for a later process."""

    known: Mapping[str, PrunedLayer] = MappingProxyType({})

    def restore(self, pruned: PrunedLayer) -> None:
        raise AssertionError("no layer is known")

    def keep(self, pruned: PrunedLayer) -> None:
        pass


def check_layerwise(config: PruneConfig) -> None:
    """Refuse what this schedule cannot do, before anything is read."""
    check_local(config.criterion)
    budget = config.budget
    if budget is not None and budget.measure == "latency":
        raise ScheduleError(
            "The layer-wise schedule never has the whole model to measure its time; give keep_flops or keep_parameters."
        )
    if (budget is None and config.keep is None) or config.knee or config.max_drop is not None or config.explore:
        raise ScheduleError(
            "The layer-wise schedule decides before it has seen what that costs; say how much may be left with "
            "keep_parameters, keep_flops, keep_memory or keep, without max_drop, knee and explore."
        )
    if budget is not None and len(budget.shares) > 1:
        raise ScheduleError(
            "The layer-wise schedule reaches one point of a budget; give one number, or use --schedule rounds."
        )


class LayerwisePruning:
    """Prunes a model layer after layer, in place, wherever its layers are. `structure` is the dense model as prices are
    counted on it: itself where it is all there."""

    def __init__(
        self,
        model: PreTrainedModel,
        calibration: Sequence[Mapping[str, Any]],
        config: PruneConfig,
        task: Task,
        *,
        evaluation: Sequence[Mapping[str, Any]] = (),
        storage: LayerStorage | None = None,
        structure: PreTrainedModel | None = None,
        device: torch.device | None = None,
        scratch: Path | None = None,
    ) -> None:
        check_layerwise(config)
        require_walkable(model)
        self.model, self.config, self.task = model, config, task
        self.storage: LayerStorage = storage or EverythingInMemory()
        self.batches = [*calibration, *evaluation]
        self.calibration, self.device, self.scratch = len(calibration), device, scratch
        self.sites: Sequence[Site] = sites_of(model, config.units)
        self.budget: Budget = budget_of(config, self.sites)
        counted = structure or model
        self.prices = prices(counted, sites_of(counted, config.units), self.budget.measure, config.units)
        check_reachable(self.budget, self.prices, self.sites, self._least)
        self.walker: Walker | None = None

    def _least(self, site: Site) -> int:
        return least_units(site, self.config)

    def widths(self) -> dict[int, int]:
        """How many units every site keeps; by errors, that takes a pass over the calibration data."""
        uniform = self.config.widths == "uniform"  # for which it is enough to see what runs
        batches = [rows_of(self.batches[0], slice(0, 1))] if uniform else self.batches[: self.calibration]
        with _refusing(self.model):
            errors = errors_of(self._walker(batches, ("pruned",)), self.model, self.sites)
        idle = [site.index for site in self.sites if site.kept and errors[site.index, list(site.kept)].isnan().any()]
        sites = [replace(site, obstacle=IDLE) if site.index in idle else site for site in self.sites]
        if idle:
            log.warning("Sites that do not run on this data are left whole: %s.", ", ".join(map(str, idle)))
            check_reachable(self.budget, self.prices, sites, self._least)
        target = self.budget.last * self.prices.dense
        return widths(self.config, sites, self.prices, target, None if uniform else errors.nan_to_num())

    def layers(self, widths: Mapping[int, int], chosen: Sequence[Member] = ()) -> Iterator[PrunedLayer]:
        """Prune one layer after the other to these widths, or take out the members that were `chosen` before; layers
        that an earlier process has done are restored."""
        storage = self.storage
        going = by_site(chosen)
        decided = {
            site.index: [Member(site.index, member) for member in going.get(site.index, ())]
            for site in self.sites
            if chosen
        }
        with _refusing(self.model):
            self.walker = walker = self._walker(self.batches, ("dense", "pruned"))
            pruner = LayerPruner(self.model, walker, self.config, widths, decided, self.scratch)
            for layer in walker.layers():
                pruned = storage.known.get(layer.path)
                if pruned is None:
                    pruned = pruner.prune(layer)
                    storage.keep(pruned)
                else:
                    walker.advance(layer, "dense")
                    storage.restore(pruned)
                walker.advance(layer, "pruned")
                yield pruned

    def quality(self, which: Which) -> Quality:
        """What the model says on the evaluation data, or where there is none on the calibration data."""
        assert self.walker is not None
        quality = Quality(self.task)
        first = self.calibration if len(self.batches) > self.calibration else 0
        for number in range(first, len(self.batches)):
            batch = self.walker.prepared(number)
            with self.walker.behind(which, number) as inputs:
                add_output(quality, batch, forward(self.model, self.task, inputs), number)
        return quality

    def _walker(self, batches: Sequence[Mapping[str, Any]], which: Sequence[Which]) -> Walker:
        return Walker(
            self.model,
            self.sites,
            batches,
            self.task,
            weights=self.storage,
            calibration=self.calibration,
            device=self.device,
            scratch=self.scratch,
            which=which,
        )


@contextmanager
def _refusing(model: PreTrainedModel) -> Iterator[None]:
    """A model that cannot be walked through is refused in a sentence."""
    try:
        yield
    except UnfollowableError as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be gone through layer by layer: {error}; use --schedule rounds."
        ) from None
