"""A whole sweep: widths first, then layer after layer, and what the model gives at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.errors import ScheduleError, UnsupportedModelError
from headprune.hooks.calls import UnfollowableError
from headprune.hooks.logits import States, forward
from headprune.layerwise.check import require_walkable
from headprune.layerwise.walker import Layer, LayerWeights, Walker, Which
from headprune.measure.evaluator import finite_logits
from headprune.measure.quality import Quality
from headprune.search.budget import Budget, budget_of, check_reachable, prices
from headprune.search.config import PruneConfig
from headprune.search.selection import least_units
from headprune.search.sweep.layers import Swept, Turn
from headprune.search.sweep.leaving import check_local
from headprune.search.sweep.widths import errors_of, widths
from headprune.tasks import Task, rows_of
from headprune.units import Member, Site, by_site, sites_of

IDLE = "it does not run on the calibration data"
log = logging.getLogger(__name__)

Known = Mapping[str, Swept]  # layers of an earlier process


def check_sweep(config: PruneConfig) -> None:
    """Refuse what a sweep cannot do, before anything is read."""
    check_local(config.made_criterion)
    budget = config.budget
    if budget is not None and budget.measure == "latency":
        raise ScheduleError(
            "A sweep never has the whole model to measure its time; give keep_flops or keep_parameters instead."
        )
    if (budget is None and config.keep is None) or config.knee or config.max_drop is not None or config.explore:
        raise ScheduleError(
            "A sweep decides what goes before it has seen what that costs; say how much may be left with "
            "keep_parameters, keep_flops, keep_memory or keep, without max_drop, knee and explore."
        )
    if budget is not None and len(budget.shares) > 1:
        raise ScheduleError("A sweep reaches one point of a budget; give one number, or use --schedule rounds.")


class Sweep:
    """Prunes a model layer after layer, in place. `structure` is the dense model as prices are counted on it: itself
    where it is all there."""

    def __init__(
        self,
        model: PreTrainedModel,
        calibration: Sequence[Mapping[str, Any]],
        config: PruneConfig,
        task: Task,
        *,
        evaluation: Sequence[Mapping[str, Any]] = (),
        weights: LayerWeights | None = None,
        structure: PreTrainedModel | None = None,
        device: torch.device | None = None,
        scratch: Path | None = None,
    ) -> None:
        check_sweep(config)
        require_walkable(model)
        self.model, self.config, self.task = model, config, task
        self.weights = weights
        self.batches = [*calibration, *evaluation]
        self.calibration, self.device, self.scratch = len(calibration), device, scratch
        self.sites: Sequence[Site] = sites_of(model, config.kinds)
        self.budget: Budget = budget_of(config, self.sites)
        counted = structure or model
        self.prices = prices(counted, sites_of(counted, config.kinds), self.budget.measure, config.kinds)
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

    def layers(
        self,
        keep: Mapping[int, int],
        known: Known | None = None,
        *,
        chosen: Sequence[Member] = (),
        done: Callable[[Layer, Swept], None] | None = None,
        again: Callable[[Layer, Swept], None] | None = None,
    ) -> Iterator[Swept]:
        """Prune one layer after the other. Of `known` layers the weights come by `again`; `chosen` are the members that
        leave where that was decided before. `done` is told when a layer is as it stays, and may write it."""
        with _refusing(self.model):
            self.walker = walker = self._walker(self.batches, ("dense", "pruned"))
            going = by_site(chosen)
            decided = {site: [Member(site, member) for member in ids] for site, ids in going.items()}
            if chosen:
                decided = {site.index: decided.get(site.index, []) for site in self.sites}
            turn = Turn(
                self.model,
                walker,
                self.config.made_criterion,
                self.config.compensate,
                self.config.kinds,
                keep,
                decided,
                self.scratch,
            )
            for layer in walker.layers():
                swept = (known or {}).get(layer.path)
                if swept is not None and again is not None:
                    walker.advance(layer, "dense")
                    again(layer, swept)
                else:
                    swept = turn.take(layer)
                    if done is not None:
                        done(layer, swept)
                walker.advance(layer, "pruned")
                yield swept

    def quality(self, which: Which) -> Quality:
        """What the model says on the evaluation data, or where there is none on the calibration data."""
        assert self.walker is not None
        quality = Quality(self.task)
        first = self.calibration if len(self.batches) > self.calibration else 0
        for number in range(first, len(self.batches)):
            batch = self.walker.prepared(number)
            with self.walker.behind(which, number) as inputs:
                output = forward(self.model, self.task, inputs)
                if isinstance(output, States):
                    blocks = (finite_logits(part, number) for part in output.blocks())
                    quality.add_blocks(batch, output.shape, blocks)
                    continue
            quality.add(batch, output, finite_logits(self.task.logits(output), number))
        return quality

    def _walker(self, batches: Sequence[Mapping[str, Any]], which: Sequence[Which]) -> Walker:
        return Walker(
            self.model,
            self.sites,
            batches,
            self.task,
            weights=self.weights,
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
