"""Reaching a budget in a few rounds: score, let all sites compete, remove, repair front to back, and score again.

A head is worth hundreds of neurons, and both compete for the same budget: what counts is the error per price. Repairs
always aim at the dense model, so what one round gets wrong the next can still make good.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.criteria.fitting import asked_sites
from headprune.errors import ScheduleError
from headprune.measure.trajectory import Step
from headprune.repair.bysite import remove_by_site
from headprune.repair.dense import DenseOutputs
from headprune.repair.solve import Repair
from headprune.search.allocate import Curve, allocate, groups
from headprune.search.budget import Budget, Prices, check_reachable, ladder, least_share, prices, units
from headprune.search.config import PruneConfig
from headprune.search.replay import check_replay
from headprune.search.stopwatch import Stopwatch
from headprune.search.ways import Subject, Taken
from headprune.surgery.cut import cut
from headprune.units import Kind, Member, Site, sites_of

SLOWER = 0.03  # how much slower than asked for a model may be before another round
CORRECTIONS = 2  # such rounds at most
EXPLORED = 0.1  # share of the FLOPs that a run without a budget goes down to


def choose(
    scores: torch.Tensor,
    sites: Sequence[Site],
    known: Prices,
    target: float,
    *,
    kinds: Collection[Kind],
    round_to: int = 8,
    min_per_site: int = 0,
    widths: str = "global",
) -> list[Member]:
    """The members that leave so that the model costs at most `target`, least important first at every site."""
    orders = {site.index: ranked(scores, site) for site in sites if competes(site, kinds)}
    fixed = known.rest + sum(known.of(site, units(site)) for site in sites if site.index not in orders)
    curves = {
        index: _curve(order, sites[index], known, round_to, least_left(sites[index], min_per_site))
        for index, order in orders.items()
    }
    if widths == "threshold":
        keep = _threshold(curves, {i: [value for value, _ in order] for i, order in orders.items()}, target - fixed)
    else:
        keep = _uniform(curves, target - fixed) if widths == "uniform" else allocate(curves, target - fixed)
    if keep is None:
        raise ScheduleError(
            "The budget cannot be met with what may be left at every site; ask for more, or lower --min-per-site."
        )
    gone: list[Member] = []
    for index, order in orders.items():
        for _, unit in order[: len(order) - keep[index]]:
            gone += unit
    return gone


def competes(site: Site, kinds: Collection[Kind]) -> bool:
    return bool(site.kept) and site.kind in kinds and not site.obstacle


def least_left(site: Site, min_per_site: int) -> int:
    """Units that must stay at a site."""
    least = min(max(min_per_site, int(bool(site.obstacle_to_emptying))), site.size)
    return -(-least // site.group)


def ranked(scores: torch.Tensor, site: Site) -> list[tuple[float, tuple[Member, ...]]]:
    """The units of a site, least important first; of equal ones in the order of their ids."""
    own = scores[site.index, list(site.kept)].double().unflatten(0, (-1, site.group)).mean(1).tolist()
    return sorted(zip(own, site.units(), strict=True))


def _curve(order: Sequence[tuple[float, Any]], site: Site, known: Prices, round_to: int, least: int) -> Curve:
    """The error at every number of units that a site may keep: what the units that go have scored, added up."""
    size = len(order)
    counts = groups(size, round_to if site.kind == "neurons" else 1, least)
    errors = [0.0]
    for value, _ in order:
        errors.append(errors[-1] + max(value, 0.0))
    return Curve(
        counts,
        tuple(errors[size - count] for count in counts),
        tuple(known.of(site, count) for count in counts),
    )


def _uniform(curves: Mapping[int, Curve], budget: float) -> dict[int, int] | None:
    """The same share of units at every site: the largest that the budget allows."""
    best = None
    for step in range(1001):
        share = step / 1000
        keep = {
            index: max((count for count in curve.counts if count <= share * curve.counts[-1]), default=curve.counts[0])
            for index, curve in curves.items()
        }
        price = sum(curve.prices[curve.counts.index(keep[index])] for index, curve in curves.items())
        if price > budget:
            break
        best = keep
    return best


def _threshold(
    curves: Mapping[int, Curve], scores: Mapping[int, Sequence[float]], budget: float
) -> dict[int, int] | None:
    """Units of all sites in one order by their scores, whatever they cost: the lowest threshold that the budget allows.
    `scores` of a site rise; where a width may not be kept, the next smaller one is."""
    levels = sorted({score for own in scores.values() for score in own})
    low, high = 0, len(levels)  # levels below a threshold: units that score less than it leave
    best = None
    while low <= high:
        middle = (low + high) // 2
        least = levels[middle] if middle < len(levels) else math.inf
        keep = {}
        for index, curve in curves.items():
            above = len(scores[index]) - bisect.bisect_left(scores[index], least)
            keep[index] = max((count for count in curve.counts if count <= above), default=curve.counts[0])
        if sum(curve.prices[curve.counts.index(keep[index])] for index, curve in curves.items()) <= budget:
            best, high = keep, middle - 1
        else:
            low = middle + 1
    return best


def refuse_unreachable(model: PreTrainedModel, config: PruneConfig) -> None:
    """Refuse a budget that is not met with everything gone that may go; for one of time, measuring tells."""
    if config.budget is not None and config.budget.measure != "latency" and config.pace == "rounds":
        sites = sites_of(model, config.kinds)
        known = prices(model, sites, config.budget.measure, config.kinds)
        check_reachable(config.budget, known, sites, lambda site: least_units(site, config))


def least_units(site: Site, config: PruneConfig) -> int:
    return least_left(site, config.min_per_site) if competes(site, config.kinds) else units(site)


class InRounds:
    """A budget in a few steps: in each, all sites compete for what it may still cost."""

    def __init__(self, run: Subject) -> None:
        self.run = run
        sites = run.sites
        config = run.config
        self.budget = budget_of(config, sites)
        self.watch: Stopwatch | None = None
        if self.budget.measure == "latency":
            self.watch = Stopwatch(run.model, config.latency_batch, config.latency_tokens, config.threads)
            self.prices = self.watch.prices(sites)
        else:
            self.prices = prices(run.model, sites, self.budget.measure, config.kinds)
        if config.budget is None and config.keep is None:  # as far as it goes
            floor = least_share(self.prices, sites, self._least)
            self.budget = Budget("flops", (max(EXPLORED, 1.02 * floor),))
        self.targets = ladder(self.budget.shares, config.rounds)
        check_reachable(self.budget, self.prices, sites, self._least)
        self.dense: DenseOutputs | None = None

    def _least(self, site: Site) -> int:
        return least_units(site, self.run.config)

    def goes_on(self) -> bool:
        taken = len(self.run.steps) - 1
        if taken < len(self.targets):
            return True
        return self._too_slow() and taken < len(self.targets) + CORRECTIONS

    def _too_slow(self) -> bool:
        """Whether the clock, after the last round, says more than what was asked for."""
        last = self.run.steps[-1].latency
        return self.watch is not None and last is not None and last > self.budget.last * (1 + SLOWER)

    def target(self, step: int) -> float:
        """The price that the model may have after this step."""
        share = self.targets[min(step, len(self.targets)) - 1]
        return share * self.prices.dense / (1.0 if self.watch is None else self.watch.factor)

    def point(self, step: int) -> float | None:
        """The share that was asked for, if this step is the one that reaches it."""
        if step < 1 or step > len(self.targets):
            return None
        share = self.targets[step - 1]
        return share if share in self.budget.shares else None

    def rule(self) -> str:
        return self.budget.rule() if self.run.config.budget is not None else ""

    def left(self, step: Step) -> int:
        if self.budget.measure == "units":
            return step.left
        return step.parameters if self.budget.measure in ("parameters", "memory") else step.flops

    def take(self) -> Taken:
        run, config = self.run, self.run.config
        sites = run.sites
        started = time.perf_counter()
        scores = run.current_scores()
        scored = time.perf_counter() - started
        chosen = distributed.on_main(
            lambda: choose(
                scores,
                sites,
                self.prices,
                self.target(len(run.steps)),
                kinds=config.kinds,
                round_to=config.round_to,
                min_per_site=config.min_per_site,
                widths=config.widths,
            )
        )
        labels: Any = config.labels
        rearrange = config.made_criterion.rearranged
        chosen = rearrange(chosen, run.model, asked_sites(run.model, config.kinds), run.calibration, run.task, labels)
        chosen = distributed.broadcast(chosen)
        gone = [float(scores[member.site, member.index]) for member in chosen]
        repairs = self._remove(chosen, run.verification(chosen, sites))
        measured = None if self.watch is None else self.watch.share(run.model, run.sites)
        value = sum(gone) / len(gone) if gone else None
        return Taken(tuple(sorted(chosen)), value, scores, repairs, scored, None, measured)

    def _remove(self, chosen: Sequence[Member], verify: Mapping[str, Any] | None = None) -> list[Repair]:
        run = self.run
        if run.config.compensate == "none":
            cut(run.model, chosen, verify=verify)
            return []
        if run.config.compensate == "site":
            return remove_by_site(run.model, run.sites, chosen, run.calibration, run.task, verify)
        if self.dense is None:
            weighted = run.config.compensate == "lstsq"  # ours alone asks which tokens the logits depend on
            self.dense = DenseOutputs(run.model, run.sites, run.calibration, run.task, weighted=weighted)
        cut(run.model, chosen, verify=verify)
        return self.dense.repair(run.model, run.sites, run.config.compensate)

    def replay(self, steps: Sequence[Step]) -> None:
        self.dense = None
        for step in steps:
            if step.step:  # a round may remove nothing, and repair all the same
                check_replay(step, self._remove(step.removed))
                self.run.reached(step.step)
        if self.watch is not None and len(steps) > 1:
            self.watch.share(self.run.model, self.run.sites)  # which tells how far the table is off


def budget_of(config: PruneConfig, sites: Sequence[Site]) -> Budget:
    if config.budget is not None:
        return config.budget
    if config.keep is not None:
        total = sum(site.size for site in sites if site.kind in config.kinds)
        return Budget("units", (config.stop.heads_left(total) / max(total, 1),))
    return Budget("flops", (EXPLORED,))
