"""One pass over the data for several criteria: sums over samples, and what is gathered at sites.

Sites whose tokens do not fit into memory together are gathered in groups, with one pass over the data for each group;
the first pass also computes everything else. Several processes share the batches, and then the sites.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.criteria.registry import Criterion
from headprune.errors import DataError, NonFiniteError
from headprune.hooks.logit_blocks import States, forward
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.hooks.site_activations import site_callbacks
from headprune.measure.predictions import Predictions
from headprune.progress import tracked
from headprune.signals import Request, SiteRequest, TokenRequest, Tokens, ZeroProbabilities, observe, tokens
from headprune.signals.moments import Moments
from headprune.signals.observe import add_gathered
from headprune.signals.reached_sites import reached_without_padding
from headprune.signals.tokens import groups_within
from headprune.tasks import Labels, Task, batch_size, own_batches
from headprune.units import Kind, Site, kept_mask, nan_scores, sites_of

Sums = dict[str, dict[str, torch.Tensor]]  # criterion -> its sums over samples
Progress = Callable[[int], None]  # called with the number of samples of each batch that is done
Gathered = dict[SiteRequest, Any]  # at one site


def only(sites: Sequence[Site], chosen: Sequence[Site]) -> list[Site]:
    """All sites, so that tables keep their rows; those that are not chosen have no members."""
    indices = {site.index for site in chosen}
    return [site if site.index in indices else dataclasses.replace(site, kept=()) for site in sites]


def sites_of_kinds(model: PreTrainedModel, kinds: Sequence[Kind]) -> list[Site]:
    sites = list(sites_of(model, kinds))
    return only(sites, [site for site in sites if site.kind in kinds])


class ScoringPass:
    """Scores by several criteria from one pass over the data.

    With `keep`, what was gathered at sites is kept where all of it fits into `memory` bytes, for `moments` and
    `without`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[Site],
        criteria: Mapping[str, Criterion],
        task: Task,
        labels: Labels,
        *,
        memory: int | None = None,
        keep: bool = False,
    ) -> None:
        self.model, self.sites, self.criteria = model, sites, criteria
        self.task, self.labels, self.keep = task, labels, keep
        self.memory = tokens.TOKEN_BYTES if memory is None else memory
        self.table = kept_mask(sites)
        requests = dict.fromkeys(request for criterion in criteria.values() for request in criterion.requests())
        if any("attention probabilities" in request.needs for request in requests):
            requests[ZeroProbabilities()] = None
        self.requests: list[Request] = list(requests)
        self.site_requests = _shared({name: criterion.site_request() for name, criterion in criteria.items()})
        self.scores: dict[str, torch.Tensor] = {}
        self.sums: Sums = {}
        self.zeros: torch.Tensor | None = None
        self.predictions_of_batches: dict[int, Predictions] = {}  # by batch
        self.samples = self.tokens = 0
        self.reached: set[int] = set()  # sites that any sample reached
        self._sites_kept: dict[int, Gathered] | None = None  # those of this process

    @property
    def unreached(self) -> list[Site]:
        """The sites that no sample reached: what is measured there, 0, is no score."""
        return [site for site in self.sites if self.samples and site.kept and site.index not in self.reached]

    @property
    def predictions(self) -> Predictions:
        return Predictions.over_processes(self.task, self.predictions_of_batches)

    def run(
        self, batches: Iterable[Mapping[str, Any]], progress: Progress | None = None, *, measure: bool = True
    ) -> dict[str, torch.Tensor]:
        """Read all batches, and score by every criterion. `measure` the model as well, from the same forward passes."""
        groups: list[list[Site]] = [[]]
        if self.site_requests:
            batches = list(batches)
            requested = list(dict.fromkeys(self.site_requests.values()))
            groups = groups_within(self.memory, self.model, self.sites, requested, batches)
        for number_of_group, group in enumerate(groups):
            first = number_of_group == 0
            gathered: dict[SiteRequest, dict[int, Any]] = {}
            requests = {
                dataclasses.replace(request, sites=frozenset(site.index for site in group)): request
                for request in self.site_requests.values()
            }
            sites = self.sites if first else only(self.sites, group)
            phase = "scoring" if len(groups) == 1 else f"scoring, pass {number_of_group + 1} of {len(groups)}"
            with distributed.fail_together():
                for position, (number, start, batch) in enumerate(own_batches(batches, phase)):
                    requests_of_batch = [*(self.requests if first else ()), *requests]
                    see = (
                        self._output_callback(number, measure=measure)
                        if first and (measure or _needs_backward(requests_of_batch))
                        else None
                    )
                    observation = observe(
                        self.model,
                        sites,
                        batch,
                        requests_of_batch,
                        task=self.task,
                        labels=self.labels,
                        see=see,
                        number=number,
                        first=start,
                        check=first and position == 0,
                    )
                    if first:
                        self._add(number, observation.answers)
                        self.samples += batch_size(batch)
                        self.tokens += observation.tokens
                        self.reached |= observation.reached
                        if uncertain := observation.uncertain - self.reached:
                            prepared = self.task.prepare(batch, input_device(self.model))
                            self.reached |= reached_without_padding(
                                self.model, self.sites, uncertain, prepared, self.task
                            )
                    for request, values in observation.gathered.items():
                        add_gathered(gathered.setdefault(requests[request], {}), values)
                    if first and progress is not None:
                        progress(batch_size(batch))
            if first:
                self._sum_over_processes(progress)
            self._score_group(group, gathered, keep=self.keep and len(groups) == 1)
        self._finish()
        return self.scores

    def _output_callback(self, number: int, *, measure: bool) -> Callable[..., None]:
        """A function for the outputs of a batch, which refuses those that are not finite, and records predictions."""
        predictions = Predictions(self.task)
        if measure:
            self.predictions_of_batches[number] = predictions

        def see(prepared: Mapping[str, Any], output: Any, logits: torch.Tensor | States) -> None:
            def checked(part: torch.Tensor) -> torch.Tensor:
                if not torch.isfinite(part.sum(dtype=torch.float32)):
                    self._refuse_non_finite(prepared, number)
                return part

            if isinstance(logits, States):
                parts = map(checked, logits.blocks())
                predictions.add_blocks(prepared, logits.shape, parts)
            else:
                predictions.add(prepared, output, checked(logits))

        return see

    def _add(self, number: int, answers_by_request: Mapping[Request, torch.Tensor]) -> None:
        for request, answer in answers_by_request.items():
            self._check(request, answer, number)
        answers = {request: answer.double() for request, answer in answers_by_request.items()}
        for name, criterion in self.criteria.items():
            if criterion.requests():
                total = self.sums.setdefault(name, {})
                for key, part in criterion.sums(answers).items():
                    total[key] = total[key] + part if key in total else part
        zeros = answers.get(ZeroProbabilities())
        if zeros is not None:
            self.zeros = zeros.sum(0) if self.zeros is None else self.zeros + zeros.sum(0)

    def _sum_over_processes(self, progress: Progress | None) -> None:
        """All processes get the sums over all batches."""
        parts = distributed.all_gather((self.sums, self.zeros, self.samples, self.tokens, self.reached))
        sums, zeros, samples, tokens, reached = zip(*parts, strict=True)
        if progress is not None and len(parts) > 1:
            progress(sum(samples) - self.samples)
        self.samples, self.tokens, self.reached = sum(samples), sum(tokens), set().union(*reached)
        self.sums = summed([part for part, count in zip(sums, samples, strict=True) if count] or [{}])
        present = [part for part in zeros if part is not None]
        self.zeros = torch.stack(present).sum(0) if present else None
        if not self.samples and any(criterion.all_requests for criterion in self.criteria.values()):
            raise DataError("There are no batches to score on; give at least one.")

    def _score_group(
        self, group: Sequence[Site], gathered: Mapping[SiteRequest, dict[int, Any]], *, keep: bool
    ) -> None:
        """Score these sites, each in the process that gets all that was gathered there."""
        mine: dict[int, Gathered] = {}
        for site, process in zip(group, distributed.shares([float(s.size * s.width) ** 2 for s in group]), strict=True):
            part = {
                request: values_by_site.pop(site.index)
                for request, values_by_site in gathered.items()
                if site.index in values_by_site
            }
            for share in distributed.gather_to(part, process) or ():
                add_gathered(mine.setdefault(site.index, {}), share)  # type: ignore[arg-type]
        scores_by_site: dict[str, dict[int, torch.Tensor]] = {name: {} for name in self.site_requests}
        with distributed.fail_together():
            for index in tracked(list(mine), "computing scores", len(mine), unit="site"):
                values = mine[index] if keep else mine.pop(index)
                for name, request in self.site_requests.items():
                    scores_by_site[name][index] = self._site_scores(
                        self.criteria[name], self.sites[index], values.get(request)
                    )
        for shared in distributed.all_gather(scores_by_site):
            for name, rows in shared.items():
                table = self.scores.setdefault(name, nan_scores(self.sites))
                for index, row in rows.items():
                    table[index, list(self.sites[index].kept)] = row.to(table)
        self._sites_kept = mine if keep else None

    def _site_scores(self, criterion: Criterion, site: Site, gathered: Any) -> torch.Tensor:
        if gathered is None or not len(gathered):  # only padding
            return torch.zeros(site.size, dtype=torch.float64)
        scores = criterion.score_site(self.model, site, gathered)
        if not torch.isfinite(scores).all() and isinstance(gathered, Tokens):
            _refuse_tokens(site, gathered)
        return scores

    def _finish(self) -> None:
        for name, criterion in self.criteria.items():
            kept = without_rows(self.table, self.unreached) if criterion.all_requests else self.table
            if name in self.site_requests:
                scores = self.scores.get(name, nan_scores(self.sites))
            elif criterion.requests():
                scores = criterion.score(self.sums[name], self.samples, kept)
            else:
                scores = criterion.from_weights(self.model, self.sites)
            self.scores[name] = finite(criterion, scores, kept, self.sites)
        named = {name: self.scores[name] for name in self.criteria}
        self.scores = distributed.broadcast(named)  # so that all processes decide by the same bits

    # --- kept tokens ---

    def moments(self, sites: Iterable[int]) -> dict[int, Moments] | None:
        """Moments of the inputs of output maps, by site index, without sites that saw only padding; None where tokens
        were not kept."""
        if not any(isinstance(request, TokenRequest) for request in self.site_requests.values()):
            return None
        return self._for_kept_tokens(sites, lambda site, tokens: tokens.moments())

    def without(self, site: Site, removed: Sequence[int], *, repaired: bool) -> torch.Tensor | None:
        """Predicted scores of the members of a site that stay when these ids are removed and, where `repaired`, the
        output map is solved again; None where this pass cannot predict them."""
        if len(self.criteria) != 1 or not self.site_requests or len(removed) >= site.size:
            return None
        (criterion,) = self.criteria.values()

        def predict(site: Site, tokens: Tokens) -> torch.Tensor | None:
            return criterion.predict_site(self.model, site, tokens, removed, repaired=repaired)

        return (self._for_kept_tokens([site.index], predict) or {}).get(site.index)

    def _for_kept_tokens(self, sites: Iterable[int], function: Callable[[Site, Tokens], Any]) -> dict[int, Any] | None:
        """`function` of the tokens of these sites, computed in the processes that have them, in all processes."""
        if self._sites_kept is None:
            return None
        results: dict[int, Any] = {}
        with distributed.fail_together():
            for index in sites:
                for value in self._sites_kept.get(index, {}).values():
                    if isinstance(value, Tokens) and len(value):
                        results[index] = function(self.sites[index], value)
        return {index: value for share in distributed.all_gather(results) for index, value in share.items()}

    # --- errors ---

    def _refuse_non_finite(self, batch: Mapping[str, Any], number: int) -> None:
        non_finite: list[tuple[Site, int]] = []

        def look(site: Site, columns: torch.Tensor) -> None:
            bad = ~torch.isfinite(site.split(columns)).all(-1).flatten(0, -2).all(0)
            non_finite.extend((site, site.kept[position]) for position in bad.nonzero().flatten().tolist())

        with torch.no_grad(), evaluating(self.model), site_callbacks(self.model, self.sites, output=look):
            output = forward(self.model, self.task, self.task.inputs(batch))
            parts = output.blocks() if isinstance(output, States) else [self.task.logits(output)]
            finite_all = all(bool(torch.isfinite(part).all()) for part in parts)
        if finite_all:  # large, but their sum alone overflows
            return
        where = ""
        if non_finite:
            site, member = non_finite[0]
            where = f" at site {site.index} ({site.path}), {site.word} {member},"
        raise NonFiniteError(
            f"NaN or Inf appeared{where} first in batch {number}; check that batch and the precision of the model."
        )

    def _check(self, request: Request, answer: torch.Tensor, number: int) -> None:
        bad = ~torch.isfinite(answer) & self.table
        if bad.any():
            *_, site, member = bad.nonzero()[0].tolist()
            value = answer[tuple(bad.nonzero()[0].tolist())].item()
            raise NonFiniteError(
                f"{type(request).__name__} is {value} at site {site} ({self.sites[site].path}), "
                f"{self.sites[site].word} {member}, first in batch {number}; check that batch and the precision of the "
                "model."
            )


def without_rows(kept: torch.Tensor, sites: Iterable[Site]) -> torch.Tensor:
    """The mask of members without those of these sites."""
    result = kept.clone()
    result[[site.index for site in sites]] = False
    return result


def _shared(requested: Mapping[str, SiteRequest | None]) -> dict[str, SiteRequest]:
    """Requests by criterion; criteria that need tokens share one request."""
    tokens = [request for request in requested.values() if isinstance(request, TokenRequest)]
    whole = functools.reduce(operator.or_, tokens) if tokens else None
    return {
        name: whole if whole is not None and isinstance(request, TokenRequest) else request
        for name, request in requested.items()
        if request is not None
    }


def _needs_backward(requests: Iterable[Request]) -> bool:
    return any(request.backward is not None for request in requests)


def _refuse_tokens(site: Site, tokens: Tokens) -> None:
    """Name the batch of the first number that is not finite, if there is one among these tokens."""
    for application in tokens.applications:
        for what, values in (("its output", application.inputs), ("the gradient at its output", application.gradient)):
            bad = () if values is None else (~torch.isfinite(site.split(values)).all(-1).all(0)).nonzero().flatten()
            for position in bad:
                raise NonFiniteError(
                    f"NaN or Inf appeared at site {site.index} ({site.path}), {site.word} {site.kept[int(position)]}, "
                    f"in {what}, first in batch {application.batch}; check that batch and the precision of the model."
                )


def summed(parts: Sequence[Sums]) -> Sums:
    first, *rest = parts
    return {
        name: {key: sum((other[name][key] for other in rest), start=value) for key, value in values.items()}
        for name, values in first.items()
    }


def finished(
    criterion: Criterion, sums: Mapping[str, torch.Tensor], samples: int, kept: torch.Tensor, sites: Sequence[Site]
) -> torch.Tensor:
    return finite(criterion, criterion.score(sums, samples, kept), kept, sites)


def finite(criterion: Criterion, scores: torch.Tensor, kept: torch.Tensor, sites: Sequence[Site]) -> torch.Tensor:
    bad = (~torch.isfinite(scores) & kept).nonzero()
    if len(bad):
        site, member = bad[0].tolist()
        raise NonFiniteError(
            f"The score of {criterion} is {scores[site, member].item()} at site {site}, {sites[site].word} "
            f"{member}; check the criterion and the weights of the model."
        )
    return scores.masked_fill(~kept, torch.nan)
