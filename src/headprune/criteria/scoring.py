"""`score`: several criteria over the same data from one instrumented pass."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import defaults, distributed
from headprune.criteria.fitting import Shard, asked_sites, can_wait, fitted_sums, groups
from headprune.criteria.kinds import as_kinds, check_kinds
from headprune.criteria.registry import Criterion, make
from headprune.criteria.scoring_pass import Pass, Progress, Sums, finished, finite, summed
from headprune.errors import CriterionError
from headprune.measure.metrics import METRICS, Measured, Metric, choose_metric
from headprune.measure.quality import Quality
from headprune.signals.late import Late, TooMuchToKeepError
from headprune.signals.moments import Moments, added, gather
from headprune.signals.predicted_scores import Ahead
from headprune.signals.residuals import ResidualGradients
from headprune.signals.spec import Fit
from headprune.tasks import Labels, Task, task_of
from headprune.tasks.checks import check_labels_word, checked_batches, warn_of_precision
from headprune.units import Kind, Site
from headprune.units.linear import refuse_quantized


@dataclass
class ScoreResult:
    """Scores and what the pass saw. `scores` is [sites x heads], or a dict of them where several criteria were asked.

    Scores stand at original positions, NaN where a head is gone. With neurons the sites are those of `all_sites`, the
    columns as many as the widest site has members, and rows of a kind that was not asked for are NaN. Results over
    shards of the data, of the same model and criteria, add up: `first + second` is what one pass over both would give.
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
    # Where a criterion is fitted to the data: its moments, if they were all gathered at once, and the data itself.
    moments: dict[int, Moments] | None = field(repr=False, default=None)
    shards: tuple[Shard, ...] = field(repr=False, default=())
    sites: tuple[Site, ...] = field(repr=False, default=())  # the rows; without members where they were not asked for
    ahead: Ahead | None = field(repr=False, default=None)

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

    def without(
        self, model: PreTrainedModel, site: Site, gone: Sequence[int], *, repaired: bool = True
    ) -> torch.Tensor | None:
        """Scores of the members of a site that stay when those with these ids leave and, where it is `repaired`, the
        others take over what they can; as far as this pass can tell, and None where it cannot."""
        if self.ahead is None or self.moments is None or site.index not in self.moments or len(gone) >= site.size:
            return None
        (criterion,) = self.criteria.values()
        (request,) = criterion.requests()
        with distributed.fail_together():
            products = self.ahead.products(model, site, self.moments[site.index], gone, repaired=repaired)
            own = criterion.sums({request: products.cpu().double()})
        parts = distributed.all_gather(own)
        sums = {key: torch.stack([part[key] for part in parts]).sum(0) for key in parts[0]}
        return criterion.score(sums, self.samples, torch.ones(products.shape[1], dtype=torch.bool))

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
            if one.gathers:
                raise CriterionError(f"Scores by {one.name} cannot be merged; score all the data at once.")
        if not torch.equal(self.kept, other.kept):
            raise CriterionError("Only scores of the same model, with the same heads left, can be merged.")
        moments, shards = None, self.shards + other.shards
        sums = summed([self.sums, other.sums])
        if shards:
            if self.moments is not None and other.moments is not None:
                moments = added(self.moments, other.moments, self.samples)
            sums.update(fitted_sums(shards, moments))
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
            moments=moments,
            shards=shards,
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
    moments: Mapping[int, Moments] | None = None,
    progress: Progress | None = None,
    look_ahead: bool = False,
    **options: Any,
) -> ScoreResult:
    """Score every head, every neuron, or both: by one criterion, or by several that share one pass over the data.

    `batches` are dicts of tensors as the model takes them, `labels` among them where a criterion needs them;
    `labels="self"` takes the model's own predictions instead, and language models without labels predict their inputs.
    `options` are the criterion's own, such as `alpha=0.7`. `task` names what the model predicts where its class does
    not say it. `units` are "heads", "neurons" or both: "heads,neurons". Where feed-forward layers are too wide for the
    memory that `criteria.fitting.LIMIT` allows, criteria that are fitted take two passes over the data for every group
    of layers that fits. `moments` are those of all the data where `batches` are a shard of it that was gathered before.
    With `look_ahead` the result knows scores `without` some units as well, if the criterion can tell them.
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
    fitted = {name: one for name, one in named.items() if one.fitted}
    gathering = {name: one for name, one in named.items() if one.gathers}
    at_once = moments is not None or len(groups(sites)) == 1
    together = named if at_once else {name: one for name, one in named.items() if name not in fitted}
    again = bool(fitted or gathering)
    data: Iterable[Mapping[str, Any]] = list(checked_batches(batches)) if again else checked_batches(batches)
    late = moments is None and can_wait(fitted.values())
    while True:
        fit: Fit | Late | None = None
        ahead = Ahead() if look_ahead and at_once and _tells_ahead(named) else None
        if fitted and at_once and late:
            fit = Late(ahead=ahead)
        elif fitted and at_once:
            fit = Fit(gather(model, sites, data, known) if moments is None else moments, ahead=ahead)
        pass_over = Pass(model, sites, together, known, labels, fit)
        try:
            pass_over.over(data, progress)
            break
        except TooMuchToKeepError:
            late = False
    fit = pass_over.fit if isinstance(pass_over.fit, Fit) else None
    shards = (Shard(model, list(data), fitted, known, labels, kinds, pass_over.kept),) if fitted else ()
    if not at_once and fitted:
        pass_over.sums.update(fitted_sums(shards))
        pass_over.criteria = named
    scores = pass_over.scores()
    for name, one in gathering.items():
        own = one.from_data(model, sites, list(data), known, labels)
        scores[name] = finite(one, own, pass_over.kept, sites)
    scores = distributed.broadcast({name: scores[name] for name in named})  # which all processes go by, to the last bit
    return ScoreResult(
        scores=next(iter(scores.values())) if criteria is None else scores,
        samples=pass_over.samples,
        tokens=pass_over.tokens,
        seconds=time.perf_counter() - started,
        quality=pass_over.quality,
        zero_probabilities=pass_over.zeros,
        criteria=named,
        sums=pass_over.sums,
        kept=pass_over.kept,
        single=criteria is None,
        moments=None if fit is None else dict(fit.moments),
        shards=shards,
        sites=tuple(sites),
        ahead=ahead if ahead is not None and ahead.is_whole() else None,
    )


def _tells_ahead(named: Mapping[str, Criterion]) -> bool:
    requests = [request for one in named.values() for request in one.requests()]
    return len(named) == 1 and len(requests) == 1 and isinstance(requests[0], ResidualGradients)


def _added(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return other if one is None else one if other is None else one + other
