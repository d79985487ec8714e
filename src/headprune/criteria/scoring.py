"""`score`: several criteria over the same data from one instrumented pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.criteria import Criterion, make
from headprune.errors import CriterionError, DataError, NonFiniteError
from headprune.hooks.outputs import evaluating, to_device
from headprune.hooks.watch import watched
from headprune.measure.quality import Quality
from headprune.signals import Entropy, Request, ZeroProbabilities
from headprune.signals.moments import Moments, gather
from headprune.signals.observe import observe
from headprune.signals.residuals import Residuals, residual_maps
from headprune.task.objectives import IGNORED, Labels, batch_size, model_inputs
from headprune.units import AttentionSite, resolve
from headprune.units.members import kept_mask

Progress = Callable[[int], None]  # called with the number of samples of each batch that is done


@dataclass
class ScoreResult:
    """Scores and what the pass saw. `scores` is [sites x heads], or a dict of them where several criteria were asked.

    Scores stand at original head positions, NaN where a head is gone. Results over shards of the data, of the same
    model and criteria, add up: `first + second` is what one pass over both shards would have given.
    """

    scores: Any
    samples: int
    tokens: int
    seconds: float
    predictions: torch.Tensor | None
    labels: torch.Tensor | None
    loss: float | None
    zero_probabilities: torch.Tensor | None
    quality: Quality | None = field(repr=False)
    criteria: dict[str, Criterion] = field(repr=False)
    sums: dict[str, dict[str, torch.Tensor]] = field(repr=False)
    kept: torch.Tensor = field(repr=False)
    single: bool = field(repr=False, default=True)
    moments: dict[int, Moments] | None = field(
        repr=False, default=None
    )  # of head outputs, where a criterion needed them

    @property
    def accuracy(self) -> float | None:
        """Share of right predictions of the model as it was scored; None without labels or classes."""
        if self.predictions is None or self.labels is None or self.labels.is_floating_point():
            return None
        counted = self.labels != IGNORED
        return float((self.predictions == self.labels)[counted].double().mean())

    def __add__(self, other: ScoreResult) -> ScoreResult:
        if list(map(str, self.criteria.values())) != list(map(str, other.criteria.values())):
            raise CriterionError("Only scores of the same criteria can be merged.")
        fitted = [name for name, one in self.criteria.items() if one.needs_residuals]
        if fitted:
            raise CriterionError(f"Scores by {fitted[0]} rest on a fit to all the data, so shards cannot be merged.")
        if not torch.equal(self.kept, other.kept):
            raise CriterionError("Only scores of the same model, with the same heads left, can be merged.")
        sums = {name: {key: own[key] + other.sums[name][key] for key in own} for name, own in self.sums.items()}
        samples = self.samples + other.samples
        mine = {next(iter(self.criteria)): self.scores} if self.single else self.scores
        scores = {
            name: _finish(criterion, sums[name], samples, self.kept) if name in sums else mine[name]
            for name, criterion in self.criteria.items()
        }
        weighted = [(r.loss, r.samples) for r in (self, other) if r.loss is not None]
        return ScoreResult(
            scores=next(iter(scores.values())) if self.single else scores,
            samples=samples,
            tokens=self.tokens + other.tokens,
            seconds=self.seconds + other.seconds,
            predictions=_joined(self.predictions, other.predictions),
            labels=_joined(self.labels, other.labels),
            loss=sum(loss * n for loss, n in weighted) / samples if len(weighted) == 2 else None,
            zero_probabilities=_added(self.zero_probabilities, other.zero_probabilities),
            quality=None,
            criteria=self.criteria,
            sums=sums,
            kept=self.kept,
            single=self.single,
        )


def score(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Any]] = (),
    *,
    criterion: str | Criterion | None = None,
    criteria: Sequence[str | Criterion] | None = None,
    labels: Labels = "given",
    progress: Progress | None = None,
    **options: Any,
) -> ScoreResult:
    """Score every head: by one criterion, or by several that share one pass over the data.

    `batches` are dicts of tensors as the model takes them, `labels` among them where a criterion needs them;
    `labels="self"` takes the model's own predictions instead, and language models without labels predict their inputs.
    `options` are the criterion's own, such as `alpha=0.7`.
    """
    if (criterion is None) == (criteria is None):
        raise CriterionError("Name one criterion=..., or several as criteria=[...].")
    check_labels_word(labels)
    if criteria is not None and options:
        raise CriterionError('Options of several criteria go into their names, such as criteria=["hies(alpha=0.7)"].')
    wanted = [criterion] if criteria is None else list(criteria)
    if not wanted:
        raise CriterionError("Name at least one criterion.")
    made = [make(spec, **options) for spec in wanted]  # type: ignore[arg-type]  # None is refused there
    named = {str(one): one for one in made}
    sites = resolve(model)
    started = time.perf_counter()
    residuals = moments = None
    if any(one.needs_residuals for one in made):
        batches = list(_checked(batches))  # they are gone over twice
        moments = gather(model, sites, batches)
        residuals = residual_maps(model, sites, moments)
    pass_over = _Pass(model, sites, named, labels, residuals)
    for number, batch in enumerate(_checked(batches)):
        pass_over.add(number, batch)
        if progress is not None:
            progress(batch_size(batch))
    result = pass_over.result(time.perf_counter() - started, single=criteria is None)
    result.moments = moments
    return result


def _checked(batches: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        raise DataError("batches must be an iterable of batches, such as [batch] for a single one.")
    for number, batch in enumerate(batches):
        if not isinstance(batch, Mapping) or not any(isinstance(value, torch.Tensor) for value in batch.values()):
            raise DataError(f"Batch {number} is not a dict of tensors as the model takes them, but {batch!r:.60}.")
        if not batch_size(batch):
            raise DataError(f"Batch {number} has no samples; leave it out.")
        yield batch


def check_labels_word(labels: str) -> None:
    if labels not in ("given", "self"):
        raise DataError(f'labels must be "given" or "self", not {labels!r}.')


class _Pass:
    """Accumulates the sums of all criteria, batch by batch, in float64."""

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[AttentionSite],
        criteria: dict[str, Criterion],
        labels: Labels,
        residuals: Residuals | None,
    ) -> None:
        self.model, self.sites, self.criteria, self.labels = model, sites, criteria, labels
        self.residuals = residuals
        self.kept = kept_mask(sites)
        requests = dict.fromkeys(request for criterion in criteria.values() for request in criterion.requests())
        if any(isinstance(request, Entropy) for request in requests):
            requests[ZeroProbabilities()] = None
        self.requests: list[Request] = list(requests)
        self.sums: dict[str, dict[str, torch.Tensor]] = {}
        self.zeros: torch.Tensor | None = None
        self.quality = Quality()
        self.samples = self.tokens = 0

    def add(self, number: int, batch: Mapping[str, Any]) -> None:
        seen = observe(self.model, self.sites, batch, self.requests, labels=self.labels, residuals=self.residuals)
        self._refuse_non_finite(seen.logits, batch, number)
        for request, answer in seen.answers.items():
            self._check(request, answer, number)
        for name, criterion in self.criteria.items():
            if criterion.requests():
                total = self.sums.setdefault(name, {})
                for key, part in criterion.sums({r: a.double() for r, a in seen.answers.items()}).items():
                    total[key] = total[key] + part if key in total else part
        zeros = seen.answers.get(ZeroProbabilities())
        if zeros is not None:
            self.zeros = _added(self.zeros, zeros.double().sum(0))
        self.samples += batch_size(batch)
        self.tokens += seen.tokens
        self.quality.add(self.model, batch, seen.logits)

    def _refuse_non_finite(self, logits: torch.Tensor, batch: Mapping[str, Any], number: int) -> None:
        if torch.isfinite(logits).all():
            return
        found: list[tuple[AttentionSite, int]] = []

        def look(site: AttentionSite, heads: torch.Tensor) -> None:
            bad = ~torch.isfinite(heads.unflatten(-1, (site.heads, -1))).all(-1).flatten(0, -2).all(0)
            found.extend((site, site.kept[position]) for position in bad.nonzero().flatten().tolist())

        with torch.no_grad(), evaluating(self.model), watched(self.model, self.sites, output=look):
            self.model(**model_inputs(self.model, to_device(batch, next(self.model.parameters()).device)))
        where = f" at site {found[0][0].index} ({found[0][0].path}), head {found[0][1]}," if found else ""
        raise NonFiniteError(
            f"NaN or Inf appeared{where} first in batch {number}; check that batch and the precision of the model."
        )

    def _check(self, request: Request, answer: torch.Tensor, number: int) -> None:
        bad = ~torch.isfinite(answer) & self.kept
        if bad.any():
            *_, site, head = bad.nonzero()[0].tolist()
            value = answer[tuple(bad.nonzero()[0].tolist())].item()
            raise NonFiniteError(
                f"{type(request).__name__} is {value} at site {site} ({self.sites[site].path}), head {head}, first "
                f"in batch {number}; check that batch and the precision of the model."
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
            predictions=self.quality.predictions,
            labels=self.quality.labels,
            loss=self.quality.loss,
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
        site, head = bad[0].tolist()
        raise NonFiniteError(
            f"The score of {criterion} is {scores[site, head].item()} at site {site}, head {head}; check the criterion "
            "and the weights of the model."
        )
    return scores.masked_fill(~kept, torch.nan)


def _joined(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return None if one is None or other is None else torch.cat([one, other])


def _added(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None else one if other is None else one + other
