"""Ways from a dense model to a small one: what leaves in the next step, and what is done about it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.measure.trajectory import Step
from headprune.repair.remove import remove_and_repair
from headprune.repair.solve import Repair
from headprune.search.config import PruneConfig
from headprune.search.replay import replay
from headprune.search.rescore import AUTO, is_due, together
from headprune.signals.moments import Moments
from headprune.tasks import Task
from headprune.units import Member, Site, kept_mask


class Subject(Protocol):
    """What a way needs to know about the run that it belongs to."""

    model: PreTrainedModel
    config: PruneConfig
    calibration: list[Mapping[str, Any]]
    task: Task
    steps: list[Step]

    @property
    def sites(self) -> Sequence[Site]: ...
    @property
    def moments(self) -> dict[int, Moments] | None: ...
    def current_scores(self) -> torch.Tensor: ...
    def without(self, site: Site, gone: Sequence[int]) -> torch.Tensor | None: ...
    def reached(self, step: int) -> None: ...
    def verification(self, chosen: Sequence[Member], sites: Sequence[Site]) -> dict[str, Any] | None: ...


@dataclass(frozen=True)
class Taken:
    """What a step did to the model."""

    removed: tuple[Member, ...]
    score: float | None  # mean score of what went
    scores: torch.Tensor | None
    repairs: list[Repair]
    scoring: float  # seconds
    changed: list[int] | None  # sites whose weights changed, None for any
    latency: float | None = None  # measured, relative to the dense model


class Way(Protocol):
    def goes_on(self) -> bool:
        """Whether there is a further step to take."""

    def take(self) -> Taken:
        """Take it."""

    def replay(self, steps: Sequence[Step]) -> None:
        """Take the dense model to where these steps led."""

    def left(self, step: Step) -> int:
        """What is left after a step, in the measure that its rules to stop count."""

    def rule(self) -> str:
        """The rule by which it ends, if it has one of its own."""

    def point(self, step: int) -> float | None:
        """The share of the dense model that was asked for, if this step is the one that reaches it."""


class UnitByUnit:
    """The papers' way: the least important units go, and all are scored again, or not."""

    def __init__(self, run: Subject) -> None:
        self.run = run
        self.first: torch.Tensor | None = None  # the scores of the dense model
        run.config.stop.heads_left(sum(self._counted(site) for site in run.sites))  # refuses a count that is too large

    def _counted(self, site: Site) -> int:
        return site.size if site.kind in self.run.config.kinds else 0

    def _choose(self, scores: torch.Tensor, sites: Sequence[Site], most: int | None = None) -> list[Member]:
        return self.run.config.steps.choose(scores, self._removable(sites), most)

    def _removable(self, sites: Sequence[Site]) -> list[Site]:
        return [site for site in sites if site.kind in self.run.config.kinds]

    def _chosen(self, scores: torch.Tensor, sites: Sequence[Site], most: int | None) -> list[Member]:
        config = self.run.config
        if config.pace != "greedy" or config.rescore != AUTO:
            return self._choose(scores, sites, most)
        return together(config.steps, self.run.steps, scores, self._removable(sites), self.run.without, most)

    def goes_on(self) -> bool:
        sites = self.run.sites
        return bool(self._choose(torch.zeros(kept_mask(sites).shape), sites))

    def left(self, step: Step) -> int:
        return step.left

    def rule(self) -> str:
        return ""

    def point(self, step: int) -> float | None:
        return None

    def take(self) -> Taken:
        run, config = self.run, self.run.config
        sites = run.sites
        started = time.perf_counter()
        scores = self._scores()
        scored = time.perf_counter() - started
        left = sum(self._counted(site) for site in sites)
        target = config.stop.heads_left(run.steps[0].left)
        most = left - target if config.keep is not None and left > target else None
        chosen = distributed.broadcast(self._chosen(scores, sites, most))
        value = float(torch.stack([scores[member.site, member.index] for member in chosen]).mean())
        repairs = remove_and_repair(
            run.model,
            chosen,
            verify=run.verification(chosen, sites),
            compensate=config.compensate,
            batches=run.calibration,
            moments=run.moments,
            task=run.task,
        )
        return Taken(tuple(chosen), value, scores, repairs, scored, sorted({member.site for member in chosen}))

    def _scores(self) -> torch.Tensor:
        run = self.run
        if run.config.pace == "greedy" and not is_due(run.config.rescore, run.steps):
            known = run.steps[-1].scores
            assert known is not None
            return known.double().masked_fill(~kept_mask(run.sites), torch.nan)  # as a journal keeps them
        if run.config.pace != "one-shot" or len(run.steps) == 1:
            self.first = run.current_scores()
            return self.first
        if self.first is None:  # of an earlier process
            assert run.steps[1].scores is not None
            self.first = run.steps[1].scores
        return self.first.masked_fill(~kept_mask(run.sites), torch.nan)

    def replay(self, steps: Sequence[Step]) -> None:
        run = self.run
        replay(run.model, steps, run.calibration, run.config.compensate, run.task)
