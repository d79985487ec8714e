"""Unit by unit, as the papers do: the least important units go, and all are scored again, or not."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from headprune import distributed
from headprune.search.budget import Measure
from headprune.search.rescore import AUTO, is_due, together
from headprune.search.schedules.schedule import Removal, RunState
from headprune.search.stopwatch import Stopwatch
from headprune.units import Member, Site, kept_mask


class Greedy:
    """`greedy` scores again as often as `rescore` says; `one-shot` scores the dense model alone."""

    measure: Measure = "units"
    watch: Stopwatch | None = None

    def __init__(self, run: RunState) -> None:
        self.points: Mapping[int, str] = {}
        run.config.stop.units_left(sum(site.size for site in _removable(run)))  # refuses a count that is too large

    def rule(self, run: RunState) -> str:
        return ""

    def removals(self, run: RunState) -> Iterator[Removal]:
        while self._is_possible(run):
            started = time.perf_counter()
            scores = self._scores(run)
            scoring = time.perf_counter() - started
            chosen = distributed.broadcast(self._choose(run, scores))
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
            return together(config.step_rule, run.steps, scores, sites, run.scorer.without, most)
        return config.step_rule.choose(scores, sites, most)

    def _scores(self, run: RunState) -> torch.Tensor:
        """Fresh ones where they are due; else those of an earlier step, as a journal keeps them."""
        if run.config.schedule == "greedy":
            known = None if is_due(run.config.rescore, run.steps) else run.steps[-1].scores
        else:
            known = run.steps[1].scores if len(run.steps) > 1 else None
        if known is None:
            return run.scorer.scores(run.sites)
        return known.double().masked_fill(~kept_mask(run.sites), torch.nan)


def _removable(run: RunState) -> Sequence[Site]:
    return [site for site in run.sites if site.kind in run.config.units]
