"""One instrumented pass over the data that serves several criteria."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.batches import Numbered
from headprune.criteria.registry import Criterion
from headprune.errors import DataError, NonFiniteError
from headprune.hooks.logits import States, forward
from headprune.hooks.outputs import evaluating
from headprune.hooks.watch import watched
from headprune.measure.quality import Quality
from headprune.signals import Request, ZeroProbabilities, observe
from headprune.signals.late import Answer, Late, TooMuchToKeepError, settled
from headprune.signals.spec import Fit
from headprune.tasks import Labels, Task, batch_size, own_batches
from headprune.units import Site, kept_mask

Sums = dict[str, dict[str, torch.Tensor]]  # criterion -> its sums over samples
Progress = Callable[[int], None]  # called with the number of samples of each batch that is done


class Pass:
    """Accumulates the sums of all criteria, batch by batch, in float64."""

    def __init__(
        self,
        model: PreTrainedModel,
        sites: Sequence[Site],
        criteria: dict[str, Criterion],
        task: Task,
        labels: Labels,
        fit: Fit | Late | None,
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
        self.qualities: dict[int, Quality] = {}  # by batch
        self.samples = self.tokens = 0
        self.waiting: list[tuple[int, Mapping[Request, Answer]]] = []  # by the batch's number

    def over(self, batches: Iterable[Mapping[str, Any]], progress: Progress | None = None) -> None:
        """Go over all batches, which several processes share; all of them get the sums over all."""
        if isinstance(self.fit, Late):
            batches = list(batches)
        own = own_batches(batches)
        if isinstance(self.fit, Late):
            self._begin(own, batches, progress)
        with distributed.fail_together():
            for one in own:
                self._go_over(one, progress)
        if isinstance(self.fit, Late):
            self.settle()
        parts = distributed.all_gather((self.sums, self.zeros, self.samples, self.tokens))
        sums, zeros, samples, tokens = zip(*parts, strict=True)
        if progress is not None and len(parts) > 1:
            progress(sum(samples) - self.samples)
        self.samples, self.tokens = sum(samples), sum(tokens)
        self.sums = summed([own for own, count in zip(sums, samples, strict=True) if count] or [{}])
        seen = [own for own in zeros if own is not None]
        self.zeros = torch.stack(seen).sum(0) if seen else None

    def _begin(self, own: Iterator[Numbered], batches: Iterable[Mapping[str, Any]], progress: Progress | None) -> None:
        """See by the first batch whether all of them can wait for their fit, in every process or in none."""
        assert isinstance(self.fit, Late)
        fits = True
        with distributed.fail_together():
            for one in itertools.islice(own, 1):  # of more processes than batches some have none
                self._go_over(one, progress)
                fits = self.fit.fits(one.batch, list(batches))
        if not all(distributed.all_gather(fits)):
            raise TooMuchToKeepError

    def _go_over(self, one: Numbered, progress: Progress | None) -> None:
        if isinstance(self.fit, Late):
            self.fit.first = one.first
        self.add(one.number, one.batch)
        if progress is not None:
            progress(batch_size(one.batch))

    @property
    def quality(self) -> Quality:
        return Quality.over_processes(self.task, self.qualities)

    def add(self, number: int, batch: Mapping[str, Any]) -> None:
        quality = self.qualities[number] = Quality(self.task)

        def see(prepared: Mapping[str, Any], output: Any, logits: torch.Tensor | States) -> None:
            def checked(part: torch.Tensor) -> torch.Tensor:
                if not torch.isfinite(part.sum(dtype=torch.float32)):
                    self._refuse_non_finite(prepared, number)
                return part

            if isinstance(logits, States):
                quality.add_blocks(prepared, logits.shape, map(checked, logits.blocks()))
            else:
                quality.add(prepared, output, checked(logits))

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
        self.samples += batch_size(batch)
        self.tokens += seen.tokens
        if isinstance(self.fit, Late):
            self.waiting.append((number, seen.answers))
        else:
            self._take(number, seen.answers)

    def settle(self) -> None:
        """Where the fit comes late: make it of what has passed by, and answer what waits for it."""
        assert isinstance(self.fit, Late)
        self.fit = self.fit.fit(self.task, self.samples)
        with distributed.fail_together():
            for number, answers in self.waiting:
                self._take(number, answers)
        self.waiting.clear()

    def _take(self, number: int, given: Mapping[Request, Answer]) -> None:
        assert not isinstance(self.fit, Late)
        found = {request: settled(answer, self.fit) for request, answer in given.items()}
        for request, answer in found.items():
            self._check(request, answer, number)
        answers = {request: answer.double() for request, answer in found.items()}
        for name, criterion in self.criteria.items():
            if criterion.requests():
                total = self.sums.setdefault(name, {})
                for key, part in criterion.sums(answers).items():
                    total[key] = total[key] + part if key in total else part
        zeros = answers.get(ZeroProbabilities())
        if zeros is not None:
            self.zeros = zeros.sum(0) if self.zeros is None else self.zeros + zeros.sum(0)

    def _refuse_non_finite(self, batch: Mapping[str, Any], number: int) -> None:
        found: list[tuple[Site, int]] = []

        def look(site: Site, columns: torch.Tensor) -> None:
            bad = ~torch.isfinite(site.split(columns)).all(-1).flatten(0, -2).all(0)
            found.extend((site, site.kept[position]) for position in bad.nonzero().flatten().tolist())

        with torch.no_grad(), evaluating(self.model), watched(self.model, self.sites, output=look):
            output = forward(self.model, self.task, self.task.inputs(batch))
            parts = output.blocks() if isinstance(output, States) else [self.task.logits(output)]
            finite_all = all(bool(torch.isfinite(part).all()) for part in parts)
        if finite_all:  # large, but their sum alone overflows
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

    def scores(self) -> dict[str, torch.Tensor]:
        """By criterion, from the sums over all batches, or from the weights."""
        if not self.samples and any(one.requests() or one.gathers for one in self.criteria.values()):
            raise DataError("There are no batches to score on; give at least one.")
        return {
            name: finished(criterion, self.sums[name], self.samples, self.kept, self.sites)
            if criterion.requests()
            else finite(criterion, criterion.from_weights(self.model, self.sites), self.kept, self.sites)
            for name, criterion in self.criteria.items()
            if not criterion.gathers
        }


def summed(parts: Sequence[Sums]) -> Sums:
    first, *rest = parts
    return {
        name: {key: sum((other[name][key] for other in rest), start=value) for key, value in own.items()}
        for name, own in first.items()
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
