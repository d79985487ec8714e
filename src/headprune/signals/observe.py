"""One batch through an instrumented model: a forward, and one backward per objective that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.hooks.logits import States, few_logits, forward, logits_of
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.hooks.probe import probabilities
from headprune.hooks.rows import Rows
from headprune.hooks.watch import frozen, watched
from headprune.signals.objectives import start_backward, targets_of
from headprune.signals.spec import Backward, Meter, NotPerSampleError, Request, SiteMeter, SiteRequest, View
from headprune.signals.tokens import draws_for
from headprune.tasks import Labels, Task, batch_size, samples_of
from headprune.units import Site, kept_mask

# (batch, output, logits), where logits in blocks are both
See = Callable[[Mapping[str, Any], Any, torch.Tensor | States], None]


@dataclass(frozen=True)
class Observation:
    """The answers to the requests, what was gathered at sites, and how many real tokens they saw."""

    answers: dict[Request, torch.Tensor]
    gathered: dict[SiteRequest, dict[int, Any]]
    tokens: int


def observe(
    model: PreTrainedModel,
    sites: Sequence[Site],
    batch: Mapping[str, Any],
    requests: Iterable[Request],
    *,
    task: Task,
    labels: Labels = "given",
    see: See | None = None,
    number: int = 0,
    first: int = 0,
) -> Observation:
    """Answer all requests on one batch with the cheapest pass that serves them.

    `see` is shown the output of the very same forward. `number` is the batch's, and `first` that of its first sample in
    all the data. The model runs in eval mode with frozen parameters and comes back as it was.
    """
    wanted = list(dict.fromkeys(requests))
    inputs = task.prepare(batch, input_device(model))

    def look(part: Mapping[str, Any], asked: Sequence[Request], show: See | None, sample: int = 0) -> Observation:
        view = View(model, task, sites, part, batch_size(part), labels, number, first + sample)
        return _observe(view, asked, show)

    try:
        return look(inputs, wanted, see)
    except NotPerSampleError:
        # A projection was applied to something that all samples share (DeBERTa's positions with share_att_key): only
        # one sample at a time tells whose gradient it is. A gradient of the whole batch need not know.
        whole = [request for request in wanted if request.backward is not None and request.backward[1] == "batch"]
        rest = [request for request in wanted if request not in whole]
        parts = [look(sample, rest, see, place) for place, sample in enumerate(samples_of(inputs))]
        answers = {
            request: torch.cat([part.answers[request] for part in parts], dim=-3) for request in parts[0].answers
        }
        if whole:
            answers.update(look(inputs, whole, None).answers)
        gathered: dict[SiteRequest, dict[int, Any]] = {request: {} for request in parts[0].gathered}
        for part in parts:
            for request, own in part.gathered.items():
                add_gathered(gathered[request], own)
        return Observation(answers, gathered, sum(part.tokens for part in parts))


def add_gathered(total: dict[int, Any], more: Mapping[int, Any]) -> None:
    """Add what was gathered at sites to what there is of them."""
    for index, own in more.items():
        total[index] = total[index] + own if index in total else own


def _observe(view: View, requests: Sequence[Request], see: See | None) -> Observation:
    model, task, batch = view.model, view.task, view.batch
    meters = {request: request.meter(view) for request in requests}
    backwards = dict.fromkeys(
        (request.backward, draw)
        for request in requests
        if request.backward is not None
        for draw in range(request.draws)
    )
    tokens = _TokenCount(view)
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(frozen(model))
        stack.enter_context(torch.set_grad_enabled(bool(backwards)))
        _attach(stack, view, list(meters.values()), tokens)
        needs_targets = any(request.needs_labels for request in requests)
        output: Any = None
        logits: Any = None
        targets: torch.Tensor | None = None
        if see is None and not backwards and not needs_targets:  # nobody looks at logits
            model(**few_logits(model, task.inputs(batch)))
        else:
            output = forward(model, task, task.inputs(batch))
            logits = logits_of(task, output)
            targets = targets_of(task, batch, logits, view.labels) if needs_targets else None
            _go_back(view, meters, logits, targets, [own for own in backwards if own[1] < draws_for(logits)])
            logits = logits if isinstance(logits, States) else logits.detach()
    if see is not None:  # the hooks have come off: it may run the model itself
        with torch.no_grad(), evaluating(model):
            see(batch, output, logits)
    del output, logits
    with evaluating(model), frozen(model):
        for meter in meters.values():
            meter.after(targets)
    gone = ~kept_mask(view.sites)
    answers = {
        request: _blanked(meter.answer(), gone) for request, meter in meters.items() if not isinstance(meter, SiteMeter)
    }
    gathered = {meter.request: meter.gathered for meter in meters.values() if isinstance(meter, SiteMeter)}
    return Observation(answers, gathered, tokens.count)


def _go_back(
    view: View,
    meters: Mapping[Request, Meter],
    logits: Any,
    targets: torch.Tensor | None,
    backwards: Sequence[tuple[Backward, int]],
) -> None:
    """One backward pass after the other, each shown to the meters that it is for."""
    for number, (backward, draw) in enumerate(backwards, start=1):
        root, gradient = start_backward(*backward, view.task, logits, targets, view.batch, draw=draw)
        view.backward, view.draw = backward, draw
        own = [meter for meter in meters.values() if meter.is_current]
        for meter in own:
            meter.start()
        if root.requires_grad:  # a model without any unit left has nothing to differentiate
            root.backward(gradient, retain_graph=number < len(backwards))
        del root, gradient
        for meter in own:
            meter.finish()
    view.backward = None


def _blanked(answer: torch.Tensor, gone: torch.Tensor) -> torch.Tensor:
    return answer.masked_fill(gone.to(answer.device), torch.nan)


def _attach(stack: ExitStack, view: View, meters: Sequence[Meter], tokens: _TokenCount) -> None:
    """Everything that any meter wants to see, through one set of hooks."""
    projections = [meter.projection for meter in meters if meter.projection is not None]
    outputs = [*(meter.output for meter in meters if meter.output is not None), tokens.output]
    maps = [meter.probabilities for meter in meters if meter.probabilities is not None]
    blocks = [meter.rows for meter in meters if meter.rows is not None]
    stack.enter_context(
        watched(
            view.model,
            view.sites,
            projection=(lambda *what: _tell(projections, *what)) if projections else None,
            output=lambda *what: _tell(outputs, *what),
        )
    )
    for meter in meters:
        stack.enter_context(meter.watching())
    if maps or blocks:

        def show(site: Site, rows: Rows) -> None:
            _tell(blocks, site, rows)
            _tell(maps, site, rows.probabilities, rows.mask)

        heads = [site for site in view.sites if site.attention]
        stack.enter_context(probabilities(view.model, heads, show, whole=bool(maps)))


def _tell(callbacks: Sequence[Callable[..., None]], *what: Any) -> None:
    for callback in callbacks:
        callback(*what)


class _TokenCount:
    """Real tokens of the batch, as the first site that runs sees them: patches of an image, frames of a sound."""

    def __init__(self, view: View) -> None:
        self.view, self.count, self._site = view, 0, -1

    def output(self, site: Site, columns: torch.Tensor) -> None:
        if self._site < 0:
            self._site = site.index
            tokens = columns.shape[:-1].numel()
            real = self.view.real(site, tokens // self.view.size)
            self.count = tokens if real is None else int(real.sum())
