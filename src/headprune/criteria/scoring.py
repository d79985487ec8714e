"""`score`: several criteria over the same data from one instrumented pass."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import defaults
from headprune.criteria.kinds import as_kinds, check_kinds
from headprune.criteria.registry import Criterion, make
from headprune.criteria.scoring_pass import Progress, ScoringPass, Sums, asked_sites, finished, summed
from headprune.errors import CriterionError
from headprune.measure.metrics import METRICS, Measured, Metric, choose_metric
from headprune.measure.quality import Quality
from headprune.tasks import Labels, Task, task_of
from headprune.tasks.checks import check_labels_word, checked_batches, warn_of_precision
from headprune.units import Kind, Site
from headprune.units.linear import refuse_quantized


@dataclass
class ScoreResult:
    """Scores and what the pass saw. `scores` is [sites x heads], or a dict of them where several criteria were asked.

    Scores stand at original positions, NaN where a head is gone. With neurons the sites are those of `all_sites`, the
    columns as many as the widest site has members, and rows of a kind that was not asked for are NaN. Results over
    shards of the data, of the same model and by criteria that stream, add up: `first + second` is what one pass over
    both would give.
    """

    scores: Any
    samples: int
    tokens: int
    seconds: float
    quality: Quality
    zero_probabilities: torch.Tensor | None
    criteria: dict[str, Criterion] = field(repr=False)
    sums: Sums = field(repr=False)
    kept: torch.Tensor = field(repr=False)
    single: bool = field(repr=False, default=True)
    sites: tuple[Site, ...] = field(repr=False, default=())  # the rows; without members where they were not asked for

    @property
    def predictions(self) -> torch.Tensor | None:
        return self.quality.predictions

    @property
    def labels(self) -> torch.Tensor | None:
        return self.quality.labels

    @property
    def loss(self) -> float | None:
        return self.quality.loss

    @property
    def accuracy(self) -> float | None:
        """Share of right predictions of the model as it was scored; None without labels or classes."""
        if self.labels is None or not self.quality.task.classes:
            return None
        return METRICS["accuracy"].of(self.quality).value

    @property
    def metric(self) -> Metric | None:
        """The task's usual metric, where there are labels for it."""
        return None if self.labels is None else choose_metric(None, self.quality)

    @property
    def measured(self) -> Measured | None:
        """What the metric says of the model as it was scored."""
        return None if self.metric is None else self.metric.of(self.quality)

    def __repr__(self) -> str:
        names = ", ".join(self.criteria)
        measured = (
            "" if self.metric is None or self.measured is None else f", {self.metric.name} {self.measured.value:.4g}"
        )
        shape = " x ".join(map(str, self.kept.shape))
        return f"<ScoreResult: {names} on {self.samples} samples, scores [{shape}]{measured}>"

    def __add__(self, other: ScoreResult) -> ScoreResult:
        if list(map(str, self.criteria.values())) != list(map(str, other.criteria.values())):
            raise CriterionError("Only scores of the same criteria can be merged.")
        for one in self.criteria.values():
            if one.site_request() is not None:
                raise CriterionError(f"Scores by {one.name} cannot be merged; score all the data at once.")
        if not torch.equal(self.kept, other.kept):
            raise CriterionError("Only scores of the same model, with the same heads left, can be merged.")
        sums = summed([self.sums, other.sums])
        samples = self.samples + other.samples
        known = {next(iter(self.criteria)): self.scores} if self.single else self.scores
        scores = {
            name: finished(criterion, sums[name], samples, self.kept, self.sites) if name in sums else known[name]
            for name, criterion in self.criteria.items()
        }
        return ScoreResult(
            scores=next(iter(scores.values())) if self.single else scores,
            samples=samples,
            tokens=self.tokens + other.tokens,
            seconds=self.seconds + other.seconds,
            quality=self.quality + other.quality,
            zero_probabilities=_added(self.zero_probabilities, other.zero_probabilities),
            criteria=self.criteria,
            sums=sums,
            kept=self.kept,
            single=self.single,
            sites=self.sites,
        )


def score(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Any]] = (),
    *,
    criterion: str | Criterion | None = None,
    criteria: Sequence[str | Criterion] | None = None,
    labels: Labels = "given",
    task: str | Task | None = None,
    units: str | Iterable[Kind] = ("heads",),
    progress: Progress | None = None,
    **options: Any,
) -> ScoreResult:
    """Score every head, every neuron, or both: by one criterion, or by several that share one pass over the data.

    `batches` are dicts of tensors as the model takes them, `labels` among them where a criterion needs them;
    `labels="self"` takes the model's own predictions instead, and language models without labels predict their inputs.
    `options` are the criterion's own, such as `alpha=0.7`. `task` names what the model predicts where its class does
    not say it. `units` are "heads", "neurons" or both: "heads,neurons". `progress` is called with the number of samples
    of every batch that is done.
    In a group of processes (torch.distributed) all of them call this with the same batches, share the work, and get the
    same result.
    """
    if criterion is not None and criteria is not None:
        raise CriterionError("Name one criterion=..., or several as criteria=[...].")
    check_labels_word(labels)
    if criteria is not None and options:
        raise CriterionError('Options of several criteria go into their names, such as criteria=["hies(alpha=0.7)"].')
    wanted = [defaults.CRITERION if criterion is None else criterion] if criteria is None else list(criteria)
    if not wanted:
        raise CriterionError("Name at least one criterion.")
    made = [make(spec, **options) for spec in wanted]
    refuse_quantized(model, "scored")
    named = {str(one): one for one in made}
    kinds = as_kinds(units)
    check_kinds(made, kinds)
    sites = asked_sites(model, kinds)
    known = task if isinstance(task, Task) else task_of(model, task)
    warn_of_precision(model)
    started = time.perf_counter()
    seen = ScoringPass(model, sites, named, known, labels)
    scores = seen.run(checked_batches(batches), progress)
    return ScoreResult(
        scores=next(iter(scores.values())) if criteria is None else scores,
        samples=seen.samples,
        tokens=seen.tokens,
        seconds=time.perf_counter() - started,
        quality=seen.quality,
        zero_probabilities=seen.zeros,
        criteria=named,
        sums=seen.sums,
        kept=seen.table,
        single=criteria is None,
        sites=tuple(sites),
    )


def _added(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None else one if other is None else one + other
