"""One pass instead of two: what is fitted to all the data, after the pass that it serves and not before.

A residual is linear in what the members of a site give, and how is known when all of it has been seen. So what sites
gave and the gradients there are kept, as far as memory allows, until then: the same sums from one forward pass less.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headprune import distributed
from headprune.signals.moments import Gathering, real_outputs
from headprune.signals.spec import Fit, Meter, View
from headprune.tasks import Task, batch_size
from headprune.units import Site

LIMIT = 1 << 29  # bytes that are kept until the end of a pass

Answer = torch.Tensor | Callable[[Fit], torch.Tensor]  # one that waits for the fit is a function of it


class TooMuchToKeepError(Exception):
    """What sites give in all the data is too large to wait for its fit."""


@dataclass
class Late:
    """Stands for a fit while its data passes by."""

    given: list[tuple[Site, Mapping[str, Any], int, torch.Tensor]] = field(default_factory=list)
    first: int = 0  # the number of the first sample of the batch that passes by
    bytes: int = 0
    ahead: Any = None  # for the fit

    def take(self, site: Site, batch: Mapping[str, Any], outputs: torch.Tensor) -> None:
        """What the output map of a site is given in a batch, or in a part of it."""
        self.given.append((site, batch, self.first, self.keep(outputs)))

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.bytes += tensor.numel() * tensor.element_size()
        return tensor

    def fits(self, seen: Mapping[str, Any], batches: Sequence[Mapping[str, Any]]) -> bool:
        """Whether all batches will, by what the first of them took."""
        return self.bytes * sum(map(_numbers, batches)) <= LIMIT * max(_numbers(seen), 1)

    def fit(self, task: Task, samples: int) -> Fit:
        """The fit to all that has passed by, so many samples here, and in all processes."""
        gathering = Gathering()
        gathering.samples = samples
        with distributed.fail_together():
            for first, whole in itertools.groupby(self.given, key=lambda given: given[2]):
                number = first
                for _, part in itertools.groupby(whole, key=lambda given: id(given[1])):  # samples that came one by one
                    for site, batch, _, outputs in (seen := list(part)):
                        tokens, rows = real_outputs(site, batch, outputs, task)
                        gathering.add(site.index, tokens, rows + number)
                    number += batch_size(seen[0][1])
        return Fit(gathering.moments(), ahead=self.ahead)


def _numbers(batch: Mapping[str, Any]) -> int:
    return sum(value.numel() for value in batch.values() if isinstance(value, torch.Tensor))


def answer_of(meter: Meter, view: View, gone: torch.Tensor) -> Answer:
    """What a meter has to say, at members that are not gone: now, or when the fit is known that it waits for."""
    if not (isinstance(view.fit, Late) and meter.request.fitted):
        return blanked(meter.answer(), gone)

    def later(fit: Fit) -> torch.Tensor:
        view.fit = fit
        meter.settle()
        return blanked(meter.answer(), gone)

    return later


def joined(answers: Sequence[Answer]) -> Answer:
    """Of samples that were looked at one by one."""
    tensors = [answer for answer in answers if isinstance(answer, torch.Tensor)]
    if len(tensors) == len(answers):
        return torch.cat(tensors, dim=-3)
    return lambda fit: torch.cat([settled(answer, fit) for answer in answers], dim=-3)


def settled(answer: Answer, fit: Fit | None) -> torch.Tensor:
    if isinstance(answer, torch.Tensor):
        return answer
    assert fit is not None
    return answer(fit)


def blanked(answer: torch.Tensor, gone: torch.Tensor) -> torch.Tensor:
    return answer.masked_fill(gone.to(answer.device), torch.nan)
