"""A budget in a few rounds: in each, all sites compete for what the model may still cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.search.budget import EXPLORED, Budget, budget_of, check_reachable, ladder, least_share, prices
from headprune.search.config import PruneConfig
from headprune.search.schedules.schedule import Removal, RunState
from headprune.search.selection import choose, least_units
from headprune.search.stopwatch import Stopwatch
from headprune.units import Member, Site, sites_of

SLOWER = 0.03  # how much slower than asked for a model may be before another round
CORRECTIONS = 2  # such rounds at most


class Rounds:
    """Shares of the dense model on the way to a budget, one after the other; for time, the clock has the last word."""

    def __init__(self, run: RunState) -> None:
        config, sites = run.config, run.sites
        self.config = config
        self.budget = budget_of(config, sites)
        self.measure = self.budget.measure
        self.watch: Stopwatch | None = None
        if self.measure == "latency":
            self.watch = Stopwatch(run.model, config.latency_batch, config.latency_tokens, config.threads)
            self.prices = self.watch.prices(sites)
        else:
            self.prices = prices(run.model, sites, self.measure, config.units)
        if config.budget is None and config.keep is None:  # as far as it goes
            floor = least_share(self.prices, sites, self._least)
            self.budget = Budget("flops", (max(EXPLORED, 1.02 * floor),))
        self.targets = ladder(self.budget.shares, config.rounds)
        check_reachable(self.budget, self.prices, sites, self._least)
        asked = self.budget.shares if len(self.budget.shares) > 1 else ()
        self.points: Mapping[int, str] = {
            number: self.budget.label(share) for number, share in enumerate(self.targets, 1) if share in asked
        }

    def _least(self, site: Site) -> int:
        return least_units(site, self.config)

    def rule(self, run: RunState) -> str:
        return self.budget.rule() if self.config.budget is not None and not self._goes_on(run) else ""

    def _goes_on(self, run: RunState) -> bool:
        taken = len(run.steps) - 1
        if taken < len(self.targets):
            return True
        return self._is_too_slow(run) and taken < len(self.targets) + CORRECTIONS

    def _is_too_slow(self, run: RunState) -> bool:
        """Whether the clock, after the last round, says more than what was asked for."""
        last = run.steps[-1].latency
        return self.watch is not None and last is not None and last > self.budget.last * (1 + SLOWER)

    def target(self, step: int) -> float:
        """The price that the model may have after this step."""
        share = self.targets[min(step, len(self.targets)) - 1]
        return share * self.prices.dense / (1.0 if self.watch is None else self.watch.factor)

    def removals(self, run: RunState) -> Iterator[Removal]:
        config = self.config
        criterion = config.criterion
        labels: Any = config.labels
        while self._goes_on(run):
            started = time.perf_counter()
            scores = run.scorer.scores(run.sites)
            scoring = time.perf_counter() - started
            chosen = self._choose(run, scores)
            asked = run.scorer.asked(run.sites)
            chosen = criterion.rearranged(chosen, run.model, asked, run.calibration, run.task, labels)
            chosen = distributed.broadcast(chosen)
            gone = [float(scores[member.site, member.index]) for member in chosen]
            yield Removal(tuple(sorted(chosen)), sum(gone) / len(gone) if gone else None, scores, scoring)

    def _choose(self, run: RunState, scores: torch.Tensor) -> Sequence[Member]:
        config = self.config
        return distributed.on_main(
            lambda: choose(
                scores,
                run.sites,
                self.prices,
                self.target(len(run.steps)),
                kinds=config.units,
                round_to=config.round_to,
                min_per_site=config.min_per_site,
                widths=config.widths,
            )
        )


def refuse_unreachable(model: PreTrainedModel, config: PruneConfig) -> None:
    """Refuse a budget that is not met with everything gone that may go; for one of time, measuring tells."""
    if config.budget is not None and config.budget.measure != "latency" and config.schedule == "rounds":
        sites = sites_of(model, config.units)
        known = prices(model, sites, config.budget.measure, config.units)
        check_reachable(config.budget, known, sites, lambda site: least_units(site, config))
