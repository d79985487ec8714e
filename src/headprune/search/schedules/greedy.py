"""Greedy and one-shot schedules: each step removes the least important units, after scoring again or not."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from headprune import distributed
from headprune.config.groups import Measure
from headprune.search.removers import RepairedSites
from headprune.search.rescore import AUTO, choose_together, is_due
from headprune.search.schedules.schedule import Removal, Remover, RunState
from headprune.search.stopwatch import Stopwatch
from headprune.units import Member, Site, kept_mask


class Greedy:
    """`greedy` scores again as often as `rescore` says; `one-shot` scores the dense model alone."""

    measure: Measure = "units"
    stopwatch: Stopwatch | None = None

    def __init__(self, run: RunState) -> None:
        self.points: Mapping[int, str] = {}

    def remover(self) -> Remover:
        return RepairedSites()

    def rule(self, run: RunState) -> str:
        return ""

    def removals(self, run: RunState) -> Iterator[Removal]:
        while self._is_possible(run):
            started = time.perf_counter()
            scores = self._scores(run)
            scoring = time.perf_counter() - started
            chosen = distributed.broadcast(self._choose(run, scores))
            if not chosen:  # no sample reaches what is left any more
                return
            value = float(torch.stack([scores[member.site, member.index] for member in chosen]).mean())
            yield Removal(tuple(chosen), value, scores, scoring)

    def _is_possible(self, run: RunState) -> bool:
        return bool(run.config.step_rule.choose(torch.zeros(kept_mask(run.sites).shape), _removable(run)))

    def _choose(self, run: RunState, scores: torch.Tensor) -> list[Member]:
        config, sites = run.config, _removable(run)
        left = sum(site.size for site in sites)
        target = config.stop.units_left(run.steps[0].left)
        most = left - target if config.keep is not None and left > target else None
        if config.schedule == "greedy" and config.rescore == AUTO:
            return choose_together(config.step_rule, run.steps, scores, sites, run.scorer.without, most)
        return config.step_rule.choose(scores, sites, most)

    def _scores(self, run: RunState) -> torch.Tensor:
        """New scores where they are due; else those of an earlier step, as in the journal."""
        if run.config.schedule == "greedy":
            earlier = None if is_due(run.config.rescore, run.steps) else run.steps[-1].scores
        else:
            earlier = run.steps[1].scores if len(run.steps) > 1 else None
        if earlier is None:
            return run.scorer.scores(run.sites)
        return earlier.double().masked_fill(~kept_mask(run.sites), torch.nan)


def _removable(run: RunState) -> Sequence[Site]:
    return [site for site in run.prunable if site.kind in run.config.units]
