"""Prunes a model layer after layer, in memory or on disk: widths first, then the layers, then its predictions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from headprune.errors import ScheduleError, UnsupportedModelError
from headprune.hooks.layer_calls import NotLayerwiseError
from headprune.hooks.logit_blocks import forward
from headprune.layerwise.check_walkable import require_walkable
from headprune.layerwise.walker import InMemory, LayerWeights, Walker, Which, layers_of
from headprune.measure.evaluator import add_output
from headprune.measure.predictions import Predictions
from headprune.search.budget import Budget, budget_of, check_reachable, prices
from headprune.search.candidates import candidates_of, check_named_sites, warn_unreached
from headprune.search.config import PruneConfig
from headprune.search.layerwise.choose import check_local
from headprune.search.layerwise.prune_layer import LayerPruner, PrunedLayer
from headprune.search.layerwise.widths import errors_of, widths
from headprune.search.observers import Observer
from headprune.search.schedules.schedule import Removal
from headprune.search.selection import least_units
from headprune.signals.reached_sites import named_sites
from headprune.tasks import Task
from headprune.units import Member, Site, by_site, sites_of


class LayerStorage(LayerWeights, Protocol):
    """Loads layers, and stores those that are pruned."""

    @property
    def finished(self) -> Mapping[str, PrunedLayer]:
        """Layers that an earlier process has pruned, by path."""

    def restore(self, pruned: PrunedLayer) -> None:
        """Turn the dense layer into the stored one."""

    def keep(self, pruned: PrunedLayer) -> None:
        """Store the pruned layer."""


class NoStorage(InMemory):
    """All layers are in memory, and nothing is stored."""

    finished: Mapping[str, PrunedLayer] = MappingProxyType({})

    def restore(self, pruned: PrunedLayer) -> None:
        raise AssertionError("no layer is stored")

    def keep(self, pruned: PrunedLayer) -> None:
        pass


def check_layerwise(config: PruneConfig) -> None:
    """Refuse options that this schedule does not support, before anything is read."""
    check_local(config.criterion)
    budget = config.budget
    if budget is not None and budget.measure == "latency":
        raise ScheduleError(
            "The layer-wise schedule never has the whole model to measure its time; give keep_flops or keep_parameters."
        )
    if (budget is None and config.keep is None) or config.knee or config.max_drop is not None or config.explore:
        raise ScheduleError(
            "The layer-wise schedule decides before it can measure the metric; set a budget with "
            "keep_parameters, keep_flops, keep_memory or keep, without max_drop, knee and explore."
        )
    if budget is not None and len(budget.shares) > 1:
        raise ScheduleError(
            "The layer-wise schedule reaches one point of a budget; give one number, or use --schedule rounds."
        )


class LayerwisePruning:
    """Prunes a model layer after layer, in place, in memory or on disk. `structure` is the dense model for prices: by
    default the model itself; no calibration sample reaches the sites `unreached`, where that is known."""

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
        unreached: Collection[int] = (),
    ) -> None:
        check_layerwise(config)
        require_walkable(model)
        self.model, self.config, self.task = model, config, task
        self.storage: LayerStorage = storage or NoStorage()
        self.batches = [*calibration, *evaluation]
        self.calibration, self.device, self.scratch = len(calibration), device, scratch
        self.sites: Sequence[Site] = sites_of(model, config.units)
        self.budget: Budget = budget_of(config, self.sites)
        priced_model = structure or model
        self.prices = prices(priced_model, sites_of(priced_model, config.units), self.budget.measure, config.units)
        check_named_sites(config, self.sites)
        self.candidates = candidates_of(config, self.sites, unreached)
        check_reachable(self.budget, self.prices, self.candidates.among(self.sites), self._least)
        self.walker: Walker | None = None

    def _least(self, site: Site) -> int:
        return least_units(site, self.config)

    def widths(self) -> dict[int, int]:
        """How many units every site keeps; by errors this takes a pass over the calibration data."""
        uniform = self.config.widths == "uniform"  # needs only to know which sites run
        calibration = self.batches[: self.calibration]
        errors = self._errors([self.task.select(self.batches[0], slice(0, 1))] if uniform else calibration)
        if uniform and self._unreached(errors):
            errors = self._errors(calibration)
        self.leave_whole([site.index for site in self._unreached(errors)])
        sites = self.candidates.among(self.sites)
        check_reachable(self.budget, self.prices, sites, self._least)
        target = self.budget.last * self.prices.dense
        return widths(self.config, sites, self.prices, target, None if uniform else errors.nan_to_num())

    def leave_whole(self, unreached: Collection[int]) -> None:
        """Note the sites that no calibration sample reaches, with a warning of those that are new."""
        warn_unreached([s for s in self.sites if s.index in unreached and s.index not in self.candidates.unreached])
        self.candidates = candidates_of(self.config, self.sites, unreached)

    def _errors(self, batches: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        with _refuse_not_layerwise(self.model):
            return errors_of(self._walker(batches, ("pruned",)), self.model, self.sites)

    def _unreached(self, errors: torch.Tensor) -> list[Site]:
        """The sites that got no token; one that was named is refused, as its layer is never there to be pruned."""
        pruned = [site for site in self.sites if site.kept and site.kind in self.config.units]
        missing = [site for site in pruned if errors[site.index, list(site.kept)].isnan().any()]
        named = [site for site in missing if site.index in (self.config.sites or ())]
        if named:
            raise ScheduleError(
                f"The layer-wise schedule prunes layers as they run, and no calibration sample reaches "
                f"{named_sites(named)}; give data that does, or use --schedule rounds."
            )
        return missing

    def prune(self, removal: Removal, observers: Sequence[Observer] = ()) -> Removal:
        """Prune all layers to the widths of this removal, or remove its members; tells the observers of each layer, and
        returns the removal with the members and repairs of all."""
        count = len(layers_of(self.model, self.sites))
        done: list[PrunedLayer] = []
        for pruned in self._layers(removal.widths or {}, removal.members):
            done.append(pruned)
            for observer in observers:
                observer.layer(len(done), count, pruned)
        members = sorted(member for pruned in done for member in pruned.removed)
        return Removal(tuple(members), repairs=[repair for pruned in done for repair in pruned.repairs])

    def _layers(self, widths: Mapping[int, int], chosen: Sequence[Member]) -> Iterator[PrunedLayer]:
        """One layer after the other; those that an earlier process has pruned are restored."""
        storage = self.storage
        ids_by_site = by_site(chosen)
        decided = {
            site.index: [Member(site.index, member) for member in ids_by_site.get(site.index, ())]
            for site in self.sites
            if chosen
        }
        with _refuse_not_layerwise(self.model):
            self.walker = walker = self._walker(self.batches, ("dense", "pruned"))
            pruner = LayerPruner(self.model, walker, self.config, widths, decided, self.scratch)
            for layer in walker.layers():
                pruned = storage.finished.get(layer.path)
                if pruned is None:
                    pruned = pruner.prune(layer)
                    storage.keep(pruned)
                else:
                    walker.advance(layer, "dense", phase="running the dense")
                    storage.restore(pruned)
                walker.advance(layer, "pruned", phase="running the pruned")
                yield pruned

    def predictions(self, which: Which) -> Predictions:
        """Predictions of the model on the evaluation data, or without any on the calibration data."""
        assert self.walker is not None
        predictions = Predictions(self.task)
        first = self.calibration if len(self.batches) > self.calibration else 0
        for number in range(first, len(self.batches)):
            batch = self.walker.prepared(number)
            with self.walker.after_layers(which, number) as inputs:
                add_output(predictions, batch, forward(self.model, self.task, inputs), number)
        return predictions

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
def _refuse_not_layerwise(model: PreTrainedModel) -> Iterator[None]:
    """Turn `NotLayerwiseError` into an error for the user."""
    try:
        yield
    except NotLayerwiseError as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot run layer by layer: {error}; use --schedule rounds."
        ) from None
