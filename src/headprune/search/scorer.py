"""Scores of a model that changes from step to step, and what the same pass over the calibration data tells beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.criteria.fitting import only
from headprune.criteria.scoring import ScoreResult, score
from headprune.criteria.scoring_pass import finite
from headprune.measure.quality import Quality
from headprune.search.config import PruneConfig
from headprune.search.rescore import AUTO
from headprune.signals.moments import Moments
from headprune.tasks import Task
from headprune.units import Site, kept_mask


class Scorer:
    """Scores of the model as it is now, computed when they are asked for and kept until `forget`."""

    def __init__(
        self, model: PreTrainedModel, calibration: Sequence[Mapping[str, Any]], config: PruneConfig, task: Task
    ) -> None:
        self.model, self.calibration, self.config, self.task = model, calibration, config, task
        self.criterion = config.criterion
        self._scores: torch.Tensor | None = None
        self._result: ScoreResult | None = None  # that they come from

    def forget(self) -> None:
        """The model has changed."""
        self._scores = self._result = None

    def scores(self, sites: Sequence[Site]) -> torch.Tensor:
        """[sites x members] of the model as it is now."""
        if self._scores is None and self.criterion.gathers:  # which needs no pass beside its own
            asked = self.asked(sites)
            labels: Any = self.config.labels
            gathered = self.criterion.from_data(self.model, asked, self.calibration, self.task, labels)
            self._scores = distributed.broadcast(finite(self.criterion, gathered, kept_mask(asked), asked))
        if self._scores is None:
            self._pass(self.calibration if self.criterion.requests() else ())  # weights alone need no pass
        assert self._scores is not None
        return self._scores

    def measure(self) -> Quality:
        """The quality of the model on the calibration data; its scores come from the same pass."""
        return self._pass(self.calibration).quality

    @property
    def moments(self) -> dict[int, Moments] | None:
        """Those that the scores rest on, if they are known."""
        return None if self._result is None else self._result.moments

    def without(self, site: Site, gone: Sequence[int]) -> torch.Tensor | None:
        """Scores of the members of a site that stay when these go as well, if the scores can tell."""
        repaired = self.config.repair == "lstsq"
        return None if self._result is None else self._result.without(self.model, site, gone, repaired=repaired)

    def asked(self, sites: Sequence[Site]) -> list[Site]:
        """The same sites; those of kinds that stay look as if nothing were left there."""
        return only(sites, [site for site in sites if site.kind in self.config.units])

    def _pass(self, batches: Sequence[Mapping[str, Any]]) -> ScoreResult:
        labels: Any = self.config.labels
        result = score(
            self.model,
            batches,
            criterion=self.criterion,
            labels=labels,
            task=self.task,
            units=self.config.units,
            look_ahead=self.config.schedule == "greedy" and self.config.rescore == AUTO,
        )
        self._scores, self._result = result.scores, result
        return result
