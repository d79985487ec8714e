"""What a schedule is: it reads the state of a run and yields removals; the pruner applies and measures them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from headprune.measure.trajectory import Step
from headprune.repair.regression import Repair
from headprune.search.budget import Measure
from headprune.search.config import PruneConfig
from headprune.search.scorer import Scorer
from headprune.search.stopwatch import Stopwatch
from headprune.tasks import Task
from headprune.units import Member, Site


@dataclass(frozen=True)
class Removal:
    """What leaves a model in one step; and, once it is applied, what was done about it."""

    members: tuple[Member, ...] = ()
    score: float | None = None  # mean score of the members
    scores: torch.Tensor | None = None  # that they were chosen by
    scoring: float = 0.0  # seconds that these took
    widths: Mapping[int, int] | None = None  # units that every site keeps, where layers choose which when they are due
    repairs: Sequence[Repair] = ()
    changed: Sequence[int] | None = None  # sites whose weights changed, None for any


@dataclass
class RunState:
    """A run as a schedule sees it. The pruner moves it on: the sites are always those of the model as it is."""

    model: PreTrainedModel
    config: PruneConfig
    task: Task
    calibration: Sequence[Mapping[str, Any]]
    scorer: Scorer
    sites: Sequence[Site]
    steps: list[Step] = field(default_factory=list)  # the dense model first


class Schedule(Protocol):
    """Made from the state of a run whose model is dense."""

    measure: Measure  # what its rules to stop count
    watch: Stopwatch | None  # where its budget is one of measured time
    points: Mapping[int, str]  # steps that reach one of several points of a budget, by their labels

    def removals(self, run: RunState) -> Iterator[Removal]:
        """What leaves next, from the state as it is then; each is applied and measured before the next is asked for."""

    def rule(self, run: RunState) -> str:
        """The rule by which it has come to its end, if it has one of its own and is there."""
