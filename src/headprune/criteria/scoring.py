"""`score`: several criteria over the same data from one instrumented pass."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import defaults, distributed
from headprune.criteria.kinds import as_kinds, check_kinds
from headprune.criteria.registry import Criterion, make
from headprune.criteria.scoring_pass import (
    Progress,
    ScoringPass,
    Sums,
    finished,
    only,
    sites_of_kinds,
    summed,
    without_rows,
)
from headprune.display import counted, data_frame, html_table
from headprune.errors import CriterionError, FormerName
from headprune.hooks.model_lock import exclusively
from headprune.measure.metrics import METRICS, Metric, MetricValue, choose_metric
from headprune.measure.predictions import Predictions
from headprune.progress import phase_bar
from headprune.signals.reached_sites import named_sites
from headprune.tasks import Labels, Task, task_of
from headprune.tasks.checks import check_labels_word, checked_batches, warn_of_precision
from headprune.units import Kind, Site
from headprune.units.linear import refuse_inference_weights, refuse_quantized

log = logging.getLogger(__name__)


@dataclass
class ScoreResult:
    """Scores, and predictions of the same pass. `scores` is [sites x heads], or a dict by name of several criteria.

    Scores are at original positions, NaN where a head was removed, and at sites that no sample reached (`unreached`):
    what did not run has no score. With neurons the sites are those of `all_sites`,
    there are as many columns as the widest site has members, and rows of a kind that was not scored are NaN. Results
    for shards of the data, of the same model and by criteria that stream, can be added: `first + second` equals one
    pass over both.
    """

    scores: Any
    samples: int
    tokens: int
    seconds: float
    quality: Predictions  # predictions, labels and losses of the model as it was scored
    zero_probabilities: torch.Tensor | None
    criteria: dict[str, Criterion] = field(repr=False)
    sums: Sums = field(repr=False)
    kept: torch.Tensor = field(repr=False)
    single: bool = field(repr=False, default=True)
    sites: tuple[Site, ...] = field(repr=False, default=())  # the rows; without members where they were not scored
    unreached: Mapping[int, str] = field(repr=False, default_factory=dict)  # sites without a score, and their paths

    @property
    def predictions(self) -> torch.Tensor | None:
        return self.quality.values

    @property
    def labels(self) -> torch.Tensor | None:
        return self.quality.labels

    @property
    def loss(self) -> float | None:
        """The mean over samples of their losses, which criteria differentiate; where tokens have labels, that of a
        sample is the mean over its tokens."""
        return self.quality.loss

    @property
    def token_loss(self) -> float | None:
        """The mean over all labelled tokens, as the model itself computes the loss of a batch; where a sample has one
        label, the same as `loss`."""
        return self.quality.token_loss

    @property
    def accuracy(self) -> float | None:
        """Share of correct predictions of the model as it was scored; None without labels or classes."""
        if self.labels is None or not self.quality.task.classes:
            return None
        return METRICS["accuracy"].of(self.quality).value

    @property
    def metric(self) -> Metric | None:
        """The task's usual metric, where there are labels for it."""
        return None if self.labels is None else choose_metric(None, self.quality)

    @property
    def metric_value(self) -> MetricValue | None:
        """The value of the metric for the model as it was scored."""
        return None if self.metric is None else self.metric.of(self.quality)

    measured = FormerName("metric_value")

    def __repr__(self) -> str:
        names = ", ".join(self.criteria)
        metric, value = self.metric, self.metric_value
        measured = "" if metric is None or value is None else f", {metric.name} {value.value:.4g}"
        shape = " x ".join(map(str, self.kept.shape))
        return f"<ScoreResult: {names} on {counted(self.samples, 'sample')}, scores [{shape}]{measured}>"

    def to_frame(self) -> Any:
        """A pandas frame with a line per head or neuron, removed ones included, whose score is NaN. The score is in the
        column `score`, or with several criteria in one column each."""
        tables = {"score": self.scores} if self.single else self.scores
        return data_frame(
            {
                "site": site.index,
                "path": site.path,
                "kind": site.kind,
                "member": member,
                **{name: float(table[site.index, member]) for name, table in tables.items()},
            }
            for site in self._scored_sites
            for member in range(site.original)
        )

    def plot(self, criterion: str | None = None) -> Any:
        """The scores as an Altair heat map, coloured by rank; of several criteria name one."""
        from headprune.reports.plots import plot_scores

        return plot_scores(self, criterion)

    @property
    def _scored_sites(self) -> list[Site]:
        """The sites whose members were scored; those of attention also where all heads are removed."""
        neurons_only = all(site.kind == "neurons" for site in self.sites if site.kept)
        return [site for site in self.sites if site.kept or (site.kind == "heads" and not neurons_only)]

    @property
    def with_scores(self) -> list[Site]:
        """The sites, without members where they have no score."""
        return only(self.sites, [site for site in self.sites if site.index not in self.unreached])

    def _repr_html_(self) -> str:
        """The least and the most important member of each site, by the first criterion."""
        name, table = next(iter({"score": self.scores}.items() if self.single else self.scores.items()))
        rows = []
        for site in self._scored_sites:
            ranked = sorted((float(table[site.index, member]), member) for member in site.kept)
            ranked = [] if site.index in self.unreached else ranked
            ends = [f"{member}: {value:.4g}" for value, member in (ranked[:1] + ranked[-1:])] or ["", ""]
            rows.append((f"{site.index} {site.path}", f"{len(site.kept)} of {site.original} {site.kind}", *ends))
        title = f"Scores by {next(iter(self.criteria)) if self.single else name} on {counted(self.samples, 'sample')}"
        return html_table(title, ("site", "left", "least important", "most important"), rows)

    def __add__(self, other: ScoreResult) -> ScoreResult:
        if list(map(str, self.criteria.values())) != list(map(str, other.criteria.values())):
            raise CriterionError("Only scores of the same criteria can be merged.")
        for criterion in self.criteria.values():
            if criterion.site_request() is not None:
                raise CriterionError(f"Scores by {criterion.name} cannot be merged; score all the data at once.")
        if not torch.equal(self.kept, other.kept):
            raise CriterionError("Only scores of the same model, with the same heads left, can be merged.")
        sums = summed([self.sums, other.sums])
        samples = self.samples + other.samples
        unreached = {index: path for index, path in self.unreached.items() if index in other.unreached}
        kept = without_rows(self.kept, [self.sites[index] for index in unreached])
        known, others = (
            {next(iter(part.criteria)): part.scores} if part.single else part.scores for part in (self, other)
        )
        scores = {
            name: finished(criterion, sums[name], samples, kept, self.sites)
            if name in sums
            else torch.where(known[name].isnan(), others[name], known[name])
            for name, criterion in self.criteria.items()
        }
        return ScoreResult(
            scores=next(iter(scores.values())) if self.single else scores,
            samples=samples,
            tokens=self.tokens + other.tokens,
            seconds=self.seconds + other.seconds,
            quality=self.quality + other.quality,
            zero_probabilities=_sum(self.zero_probabilities, other.zero_probabilities),
            criteria=self.criteria,
            sums=sums,
            kept=self.kept,
            single=self.single,
            sites=self.sites,
            unreached=unreached,
        )


@exclusively
def score(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Any]] = (),
    *,
    criterion: str | Criterion | None = None,
    criteria: Sequence[str | Criterion] | None = None,
    labels: Labels = "given",
    task: str | Task | None = None,
    units: str | Iterable[Kind] = ("heads",),
    progress: Progress | bool | None = None,
    **options: Any,
) -> ScoreResult:
    """Score every head, every neuron, or both: by one criterion, or by several that share one pass over the data.

    `batches` are dicts of tensors as the model takes them, `labels` among them where a criterion needs them;
    `labels="self"` uses the model's predictions instead, and language models without labels predict their inputs.
    `options` are those of the criterion, such as `alpha=0.7`. `task` names the task where the model's class does not
    determine it. `units` are "heads", "neurons" or both: "heads,neurons". A `progress` bar is shown in a terminal and
    in a notebook; True shows it anywhere, False nowhere, and a function is called with the number of samples of every
    finished batch instead. In a group of processes (torch.distributed) all of them call this with the same batches,
    share the work, and get the same result. Threads that share a model wait for each other.
    """
    if criterion is not None and criteria is not None:
        raise CriterionError("Name one criterion=..., or several as criteria=[...].")
    check_labels_word(labels)
    if criteria is not None and options:
        raise CriterionError('Options of several criteria go into their names, such as criteria=["hies(alpha=0.7)"].')
    specs = [defaults.CRITERION if criterion is None else criterion] if criteria is None else list(criteria)
    if not specs:
        raise CriterionError("Name at least one criterion.")
    instances = [make(spec, **options) for spec in specs]
    refuse_quantized(model, "scored")
    refuse_inference_weights(model)
    named = {str(instance): instance for instance in instances}
    kinds = as_kinds(units)
    check_kinds(instances, kinds)
    sites = sites_of_kinds(model, kinds)
    known = task if isinstance(task, Task) else task_of(model, task)
    warn_of_precision(model)
    started = time.perf_counter()
    scoring_pass = ScoringPass(model, sites, named, known, labels)
    if callable(progress):
        scores = scoring_pass.run(checked_batches(batches, model), progress)
    else:
        checked: Any = checked_batches(batches, model)
        with phase_bar(f"Scoring by {', '.join(named)}", progress if distributed.is_main() else False):
            scores = scoring_pass.run(list(checked) if isinstance(batches, Sequence) else checked)
    unreached = scoring_pass.unreached
    if unreached:
        log.warning(
            "No sample reaches %s, so there is no score; give samples that do, or score by the weights alone, without "
            "data.",
            named_sites(unreached),
        )
        kept = without_rows(scoring_pass.table, unreached)
        scores = {name: table.masked_fill(~kept, torch.nan) for name, table in scores.items()}
    return ScoreResult(
        scores=next(iter(scores.values())) if criteria is None else scores,
        samples=scoring_pass.samples,
        tokens=scoring_pass.tokens,
        seconds=time.perf_counter() - started,
        quality=scoring_pass.predictions,
        zero_probabilities=scoring_pass.zeros,
        criteria=named,
        sums=scoring_pass.sums,
        kept=scoring_pass.table,
        single=criteria is None,
        sites=tuple(sites),
        unreached={site.index: site.path for site in unreached},
    )


def _sum(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    return second if first is None else first if second is None else first + second
