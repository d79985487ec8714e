"""The interface of schedules: they read the state of a run and yield removals, which the pruner applies and
measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from headprune.config.groups import Measure
from headprune.measure.trajectory import Step
from headprune.repair.regression import Repair
from headprune.search.candidates import Candidates
from headprune.search.config import PruneConfig
from headprune.search.observers import Observer
from headprune.search.scorer import Scorer
from headprune.search.stopwatch import Stopwatch
from headprune.tasks import Task
from headprune.units import Member, Site, sites_of


@dataclass(frozen=True)
class Removal:
    """The units that are removed in one step; and, once it is applied, the repairs."""

    members: tuple[Member, ...] = ()
    score: float | None = None  # mean score of the members
    scores: torch.Tensor | None = None  # by which they were chosen
    scoring: float = 0.0  # seconds of scoring
    widths: Mapping[int, int] | None = None  # units that every site keeps, where each layer chooses when it is reached
    repairs: Sequence[Repair] = ()
    changed: Sequence[int] | None = None  # sites whose weights changed, None for any


@dataclass
class RunState:
    """The state of a run for its schedule. After a removal `refresh` updates it: its sites are those of the current
    model."""

    model: PreTrainedModel
    config: PruneConfig
    task: Task
    calibration: Sequence[Mapping[str, Any]]
    scorer: Scorer
    sites: Sequence[Site]
    candidates: Candidates = field(default_factory=Candidates)
    steps: list[Step] = field(default_factory=list)  # the dense model first
    observers: Sequence[Observer] = ()

    @property
    def prunable(self) -> Sequence[Site]:
        """The sites, with an obstacle at those that stay whole in this run."""
        return self.candidates.among(self.sites)

    def refresh(self) -> None:
        """After a removal: resolve the sites again, and drop the scores."""
        self.sites = sites_of(self.model, self.config.units)
        self.scorer.clear()


class Remover(Protocol):
    """Applies removals: units are removed from the weights, and sites are repaired as the schedule requires."""

    def apply(self, run: RunState, removal: Removal, verify: Mapping[str, Any] | None = None) -> Removal:
        """Change the model, refresh the state of the run, and return the removal with its repairs; `verify` masked ==
        removed on these inputs."""


class Schedule(Protocol):
    """Created from the state of a run whose model is dense."""

    measure: Measure  # in which stopping rules count
    stopwatch: Stopwatch | None  # where its budget is measured time
    points: Mapping[int, str]  # steps that reach one of several points of a budget, by their labels

    def removals(self, run: RunState) -> Iterator[Removal]:
        """The next removals from the current state; each is applied and measured before the next is requested."""

    def remover(self) -> Remover:
        """What applies its removals to the dense model, one after the other."""

    def rule(self, run: RunState) -> str:
        """The rule by which the schedule ended the run; empty where it did not."""
