"""`score`: several criteria over the same data from one instrumented pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import defaults
from headprune.criteria.registry import Criterion, make
from headprune.errors import CriterionError, DataError, NonFiniteError
from headprune.hooks.outputs import evaluating
from headprune.hooks.watch import watched
from headprune.measure.metrics import METRICS, Measured, Metric, choose_metric
from headprune.measure.quality import Quality
from headprune.signals import Request, ZeroProbabilities, observe
from headprune.signals.moments import Moments, added, gather
from headprune.signals.spec import Fit
from headprune.task import Labels, Task, batch_size, task_of
from headprune.task.checks import check_labels_word, checked_batches, warn_of_precision
from headprune.units import Site, kept_mask, resolve

Progress = Callable[[int], None]  # called with the number of samples of each batch that is done
Sums = dict[str, dict[str, torch.Tensor]]  # criterion -> its sums over samples


@dataclass
class ScoreResult:
    """Scores and what the pass saw. `scores` is [sites x heads], or a dict of them where several criteria were asked.

    Scores stand at original positions, NaN where a head is gone. Results over shards of the data, of the same model
    and criteria, add up: `first + second` is what one pass over both shards would have given.
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
    moments: dict[int, Moments] | None = field(repr=False, default=None)  # where a criterion is fitted to the data
    # Sums of the fitted criteria on the same data, but for another fit: that of more data than this shard.
    refit: Callable[[Fit], Sums] | None = field(repr=False, default=None)

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
        if not torch.equal(self.kept, other.kept):
            raise CriterionError("Only scores of the same model, with the same heads left, can be merged.")
        moments, refit = None, None
        mine, others = self.sums, other.sums
        if self.moments is not None and other.moments is not None:
            assert self.refit is not None
            assert other.refit is not None
            first, second = self.refit, other.refit
            moments = added(self.moments, other.moments, self.samples)
            fit = Fit(moments)
            mine, others = {**mine, **first(fit)}, {**others, **second(fit)}
            refit = lambda fit: _summed(first(fit), second(fit))  # noqa: E731
        sums = _summed(mine, others)
        samples = self.samples + other.samples
        known = {next(iter(self.criteria)): self.scores} if self.single else self.scores
        scores = {
            name: _finish(criterion, sums[name], samples, self.kept) if name in sums else known[name]
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
            moments=moments,
            refit=refit,
        )


def score(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Any]] = (),
    *,
    criterion: str | Criterion | None = None,
    criteria: Sequence[str | Criterion] | None = None,
    labels: Labels = "given",
    task: str | Task | None = None,
    moments: Mapping[int, Moments] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> ScoreResult:
    """Score every head: by one criterion, or by several that share one pass over the data.

    `batches` are dicts of tensors as the model takes them, `labels` among them where a criterion needs them;
    `labels="self"` takes the model's own predictions instead, and language models without labels predict their inputs.
    `options` are the criterion's own, such as `alpha=0.7`. `task` names what the model predicts where its class does
    not say it. `moments` are those of all the data where `batches` are a shard of it that was gathered before.
    """
    if criterion is not None and criteria is not None:
        raise CriterionError("Name one criterion=..., or several as criteria=[...].")
    check_labels_word(labels)
    if criteria is not None and options:
        raise CriterionError('Options of several criteria go into their names, such as criteria=["hies(alpha=0.7)"].')
    wanted = [criterion or defaults.CRITERION] if criteria is None else list(criteria)
    if not wanted:
        raise CriterionError("Name at least one criterion.")
    made = [make(spec, **options) for spec in wanted]
    named = {str(one): one for one in made}
    sites = resolve(model)
    known = task if isinstance(task, Task) else task_of(model, task)
    warn_of_precision(model)
    started = time.perf_counter()
    fit = None
    data = checked_batches(batches)
    fitted = any(one.fitted for one in made)
    if fitted:
        listed = list(data)  # they are gone over twice
        fit = Fit(gather(model, sites, listed, known) if moments is None else moments)
        data = iter(listed)
    pass_over = _Pass(model, sites, named, known, labels, fit)
    for number, batch in enumerate(data):
        pass_over.add(number, batch)
        if progress is not None:
            progress(batch_size(batch))
    result = pass_over.result(time.perf_counter() - started, single=criteria is None)
    if fit is not None:
        result.moments = dict(fit.moments)
        result.refit = lambda fit: _refitted(model, listed, named, known, labels, fit, result.kept)
    return result


def _refitted(
    model: PreTrainedModel,
    batches: Sequence[Mapping[str, Any]],
    criteria: Mapping[str, Criterion],
    task: Task,
    labels: Labels,
    fit: Fit,
    kept: torch.Tensor,
) -> Sums:
    sites = resolve(model)
    if not torch.equal(kept_mask(sites), kept):
        raise CriterionError("The model has lost heads since it was scored, so these scores cannot be merged any more.")
    again = _Pass(model, sites, {name: one for name, one in criteria.items() if one.fitted}, task, labels, fit)
    for number, batch in enumerate(batches):
        again.add(number, batch)
    return again.sums


class _Pass:
    """Accumulates the sums of all criteria, batch by batch, in float64."""

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[Site],
        criteria: dict[str, Criterion],
        task: Task,
        labels: Labels,
        fit: Fit | None,
    ) -> None:
        self.model, self.sites, self.criteria = model, sites, criteria
        self.task, self.labels, self.fit = task, labels, fit
        self.kept = kept_mask(sites)
        requests = dict.fromkeys(request for criterion in criteria.values() for request in criterion.requests())
        if any("attention probabilities" in request.needs for request in requests):
            requests[ZeroProbabilities()] = None
        self.requests: list[Request] = list(requests)
        self.sums: Sums = {}
        self.zeros: torch.Tensor | None = None
        self.quality = Quality(task)
        self.samples = self.tokens = 0

    def add(self, number: int, batch: Mapping[str, Any]) -> None:
        def see(prepared: Mapping[str, Any], output: Any, logits: torch.Tensor) -> None:
            if not torch.isfinite(logits.sum(dtype=torch.float32)):
                self._refuse_non_finite(prepared, number)
            self.quality.add(prepared, output, logits)

        seen = observe(
            self.model,
            self.sites,
            batch,
            self.requests,
            task=self.task,
            labels=self.labels,
            fit=self.fit,
            see=see,
        )
        for request, answer in seen.answers.items():
            self._check(request, answer, number)
        answers = {request: answer.double() for request, answer in seen.answers.items()}
        for name, criterion in self.criteria.items():
            if criterion.requests():
                total = self.sums.setdefault(name, {})
                for key, part in criterion.sums(answers).items():
                    total[key] = total[key] + part if key in total else part
        zeros = answers.get(ZeroProbabilities())
        if zeros is not None:
            self.zeros = _added(self.zeros, zeros.sum(0))
        self.samples += batch_size(batch)
        self.tokens += seen.tokens

    def _refuse_non_finite(self, batch: Mapping[str, Any], number: int) -> None:
        found: list[tuple[Site, int]] = []

        def look(site: Site, columns: torch.Tensor) -> None:
            bad = ~torch.isfinite(site.split(columns)).all(-1).flatten(0, -2).all(0)
            found.extend((site, site.kept[position]) for position in bad.nonzero().flatten().tolist())

        with torch.no_grad(), evaluating(self.model), watched(self.model, self.sites, output=look):
            logits = self.task.logits(self.model(**self.task.inputs(batch)))
        if torch.isfinite(logits).all():  # large, but their sum alone overflows
            return
        where = f" at site {found[0][0].index} ({found[0][0].path}), {found[0][0].word} {found[0][1]}," if found else ""
        raise NonFiniteError(
            f"NaN or Inf appeared{where} first in batch {number}; check that batch and the precision of the model."
        )

    def _check(self, request: Request, answer: torch.Tensor, number: int) -> None:
        bad = ~torch.isfinite(answer) & self.kept
        if bad.any():
            *_, site, member = bad.nonzero()[0].tolist()
            value = answer[tuple(bad.nonzero()[0].tolist())].item()
            raise NonFiniteError(
                f"{type(request).__name__} is {value} at site {site} ({self.sites[site].path}), "
                f"{self.sites[site].word} {member}, first in batch {number}; check that batch and the precision of the "
                "model."
            )

    def result(self, seconds: float, *, single: bool) -> ScoreResult:
        looks_at_data = any(criterion.requests() for criterion in self.criteria.values())
        if looks_at_data and not self.samples:
            raise DataError("There are no batches to score on; give at least one.")
        scores = {}
        for name, criterion in self.criteria.items():
            if criterion.requests():
                scores[name] = _finish(criterion, self.sums[name], self.samples, self.kept)
            else:
                scores[name] = _finite(criterion, criterion.from_weights(self.model, self.sites), self.kept)
        return ScoreResult(
            scores=next(iter(scores.values())) if single else scores,
            samples=self.samples,
            tokens=self.tokens,
            seconds=seconds,
            quality=self.quality,
            zero_probabilities=self.zeros,
            criteria=self.criteria,
            sums=self.sums,
            kept=self.kept,
            single=single,
        )


def _finish(criterion: Criterion, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor) -> torch.Tensor:
    return _finite(criterion, criterion.score(sums, samples, kept), kept)


def _finite(criterion: Criterion, scores: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    bad = (~torch.isfinite(scores) & kept).nonzero()
    if len(bad):
        site, member = bad[0].tolist()
        raise NonFiniteError(
            f"The score of {criterion} is {scores[site, member].item()} at site {site}, head {member}; check the "
            "criterion and the weights of the model."
        )
    return scores.masked_fill(~kept, torch.nan)


def _summed(one: Sums, other: Sums) -> Sums:
    return {name: {key: own[key] + other[name][key] for key in own} for name, own in one.items()}


def _added(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None else one if other is None else one + other
