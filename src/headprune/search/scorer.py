"""Scores of a model that changes from step to step, and what the same pass over the calibration data tells beside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.criteria.scoring_pass import ScoringPass, only
from headprune.measure.quality import Quality
from headprune.search.config import PruneConfig
from headprune.search.memory import token_bytes
from headprune.signals.moments import Moments
from headprune.tasks import Task
from headprune.units import Site


class Scorer:
    """Scores of the model as it is now, computed when they are asked for and kept until `forget`."""

    def __init__(
        self, model: PreTrainedModel, calibration: Sequence[Mapping[str, Any]], config: PruneConfig, task: Task
    ) -> None:
        self.model, self.calibration, self.config, self.task = model, calibration, config, task
        self.criterion = config.criterion
        self._pass: ScoringPass | None = None  # over the model as it is now

    def forget(self) -> None:
        """The model has changed."""
        self._pass = None

    def scores(self, sites: Sequence[Site]) -> torch.Tensor:
        """[sites x members] of the model as it is now."""
        return (self._pass or self._run(sites, measure=False)).scores[str(self.criterion)]

    def measure(self, sites: Sequence[Site]) -> Quality:
        """The quality of the model on the calibration data; its scores come from the same pass."""
        return self._run(sites, measure=True).quality

    def moments(self, sites: Iterable[int]) -> dict[int, Moments] | None:
        """Of what these sites give, if the scores come from it and it was kept."""
        return None if self._pass is None else self._pass.moments(sites)

    def without(self, site: Site, gone: Sequence[int]) -> torch.Tensor | None:
        """Scores of the members of a site that stay when these go as well, if the scores can tell."""
        repaired = self.config.repair == "lstsq"
        return None if self._pass is None else self._pass.without(site, gone, repaired=repaired)

    def asked(self, sites: Sequence[Site]) -> list[Site]:
        """The same sites; those of kinds that stay look as if nothing were left there."""
        return only(sites, [site for site in sites if site.kind in self.config.units])

    def _run(self, sites: Sequence[Site], *, measure: bool) -> ScoringPass:
        self._pass = None  # which gives its memory back
        labels: Any = self.config.labels
        named, greedy = {str(self.criterion): self.criterion}, self.config.schedule == "greedy"
        memory = token_bytes(self.config.memory)
        made = ScoringPass(self.model, self.asked(sites), named, self.task, labels, memory=memory, keep=greedy)
        made.run(self.calibration if measure or self.criterion.asks else (), measure=measure)
        self._pass = made
        return made
