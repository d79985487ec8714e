"""Scores of a model that changes from step to step, and by-products of the same pass over the calibration data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.criteria.scoring_pass import ScoringPass, only
from headprune.measure.predictions import Predictions
from headprune.search.config import PruneConfig
from headprune.search.memory import token_bytes
from headprune.signals.moments import Moments
from headprune.tasks import Task
from headprune.units import Site


class Scorer:
    """Scores of the current model, computed on demand and cached until `clear`."""

    def __init__(
        self, model: PreTrainedModel, calibration: Sequence[Mapping[str, Any]], config: PruneConfig, task: Task
    ) -> None:
        self.model, self.calibration, self.config, self.task = model, calibration, config, task
        self.criterion = config.criterion
        self._pass: ScoringPass | None = None  # over the current model

    def clear(self) -> None:
        """Drop the scores: the model has changed."""
        self._pass = None

    def scores(self, sites: Sequence[Site]) -> torch.Tensor:
        """Scores [sites x members] of the current model."""
        return (self._pass or self._run(sites, measure=False)).scores[str(self.criterion)]

    def measure(self, sites: Sequence[Site]) -> Predictions:
        """Predictions of the model on the calibration data; its scores come from the same pass."""
        return self._run(sites, measure=True).predictions

    def moments(self, sites: Iterable[int]) -> dict[int, Moments] | None:
        """Moments of the outputs of these sites, if the scoring pass kept their tokens."""
        return None if self._pass is None else self._pass.moments(sites)

    def without(self, site: Site, removed: Sequence[int]) -> torch.Tensor | None:
        """Predicted scores of the remaining members of a site without these, if the scoring pass kept its tokens."""
        repaired = self.config.repair == "lstsq"
        return None if self._pass is None else self._pass.without(site, removed, repaired=repaired)

    def sites_of_kinds(self, sites: Sequence[Site]) -> list[Site]:
        """The same sites, with those of other kinds emptied."""
        return only(sites, [site for site in sites if site.kind in self.config.units])

    def _run(self, sites: Sequence[Site], *, measure: bool) -> ScoringPass:
        self._pass = None  # frees its memory
        labels: Any = self.config.labels
        named, greedy = {str(self.criterion): self.criterion}, self.config.schedule == "greedy"
        memory = token_bytes(self.config.memory)
        scoring_pass = ScoringPass(
            self.model, self.sites_of_kinds(sites), named, self.task, labels, memory=memory, keep=greedy
        )
        scoring_pass.run(self.calibration if measure or self.criterion.all_requests else (), measure=measure)
        self._pass = scoring_pass
        return scoring_pass
