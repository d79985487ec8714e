"""The rounds schedule: a budget is reached in a few rounds, in each of which all sites compete for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from headprune import distributed
from headprune.search.budget import (
    UNBOUNDED_SHARE,
    Budget,
    budget_of,
    check_reachable,
    intermediate_shares,
    least_share,
    prices,
)
from headprune.search.removers import RepairedModel
from headprune.search.schedules.schedule import Removal, Remover, RunState
from headprune.search.selection import choose, least_units
from headprune.search.stopwatch import Stopwatch
from headprune.units import Member, Site

SLOWER = 0.03  # how much slower than its target a model may be before another round
CORRECTIONS = 2  # further rounds at most


class Rounds:
    """Goes through shares of the dense model down to the budget; for a budget of time the model is measured after
    each."""

    def __init__(self, run: RunState) -> None:
        config, sites = run.config, run.prunable
        self.config = config
        self.budget = budget_of(config, sites)
        self.measure = self.budget.measure
        self.stopwatch: Stopwatch | None = None
        if self.measure == "latency":
            self.stopwatch = Stopwatch(run.model, config.latency_batch, config.latency_tokens, config.threads)
            self.prices = self.stopwatch.prices(sites)
        else:
            self.prices = prices(run.model, sites, self.measure, config.units)
        if config.budget is None and config.keep is None:  # without a budget
            floor = least_share(self.prices, sites, self._least)
            self.budget = Budget("flops", (max(UNBOUNDED_SHARE, 1.02 * floor),))
        self.targets = intermediate_shares(self.budget.shares, config.rounds)
        if self.measure == "latency":  # others were checked without measuring
            check_reachable(self.budget, self.prices, sites, self._least)
        points = self.budget.shares if len(self.budget.shares) > 1 else ()
        self.points: Mapping[int, str] = {
            number: self.budget.label(share) for number, share in enumerate(self.targets, 1) if share in points
        }

    def _least(self, site: Site) -> int:
        return least_units(site, self.config)

    def remover(self) -> Remover:
        return RepairedModel()

    def rule(self, run: RunState) -> str:
        return self.budget.rule() if self.config.budget is not None and not self._continues(run) else ""

    def _continues(self, run: RunState) -> bool:
        steps_taken = len(run.steps) - 1
        if steps_taken < len(self.targets):
            return True
        return self._is_too_slow(run) and steps_taken < len(self.targets) + CORRECTIONS

    def _is_too_slow(self, run: RunState) -> bool:
        """Whether the measured time after the last round is above the target."""
        last = run.steps[-1].latency
        return self.stopwatch is not None and last is not None and last > self.budget.last * (1 + SLOWER)

    def target(self, step: int) -> float:
        """The price that the model may have after this step."""
        share = self.targets[min(step, len(self.targets)) - 1]
        return share * self.prices.dense / (1.0 if self.stopwatch is None else self.stopwatch.factor)

    def removals(self, run: RunState) -> Iterator[Removal]:
        config = self.config
        criterion = config.criterion
        labels: Any = config.labels
        while self._continues(run):
            started = time.perf_counter()
            scores = run.scorer.scores(run.sites)
            scoring = time.perf_counter() - started
            chosen = self._choose(run, scores)
            competing = run.scorer.sites_of_kinds(run.sites)
            chosen = criterion.rearranged(chosen, run.model, competing, run.calibration, run.task, labels)
            chosen = distributed.broadcast(chosen)
            scores_leaving = [float(scores[member.site, member.index]) for member in chosen]
            yield Removal(
                tuple(sorted(chosen)),
                sum(scores_leaving) / len(scores_leaving) if scores_leaving else None,
                scores,
                scoring,
            )

    def _choose(self, run: RunState, scores: torch.Tensor) -> Sequence[Member]:
        config = self.config
        return distributed.on_main(
            lambda: choose(
                scores,
                run.prunable,
                self.prices,
                self.target(len(run.steps)),
                kinds=config.units,
                round_to=config.round_to,
                min_per_site=config.min_per_site,
                widths=config.widths,
            )
        )
