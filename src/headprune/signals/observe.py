"""One batch through an instrumented model: a forward pass, and one backward pass per requested objective."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.hooks.attention_blocks import Rows
from headprune.hooks.attention_probabilities import probabilities, refuse_changed_outputs
from headprune.hooks.logit_blocks import States, few_logits, forward, logits_of
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.hooks.site_activations import frozen, site_callbacks
from headprune.signals.objectives import start_backward, targets_of
from headprune.signals.reached_sites import Reached
from headprune.signals.row_samples import NotPerSampleError, RowSamples, UnverifiedRowsError, refuse_inseparable
from headprune.signals.spec import Backward, Meter, Request, SiteMeter, SiteRequest, View
from headprune.signals.tokens import draws_for
from headprune.tasks import Labels, Task
from headprune.units import Site, kept_mask

# (batch, output, logits), where logits in blocks are both
See = Callable[[Mapping[str, Any], Any, torch.Tensor | States], None]


@dataclass(frozen=True)
class Observation:
    """The answers to the requests, what was gathered at sites, how many real tokens they saw, and which sites ran."""

    answers: dict[Request, torch.Tensor]
    gathered: dict[SiteRequest, dict[int, Any]]
    tokens: int
    reached: frozenset[int]  # sites that got any token
    uncertain: frozenset[int]  # sites that got tokens which may all be padding


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
    check: bool = False,
) -> Observation:
    """Answer all requests on one batch with the cheapest pass that is enough.

    `see` is called with the output of the same forward pass. `number` is the number of the batch, and `first` that of
    its first sample in all the data. The model runs in eval mode with frozen parameters, and is restored afterwards.
    With `check`, where attention probabilities are read, the model also runs without that, and other logits are
    refused.
    """
    distinct = list(dict.fromkeys(requests))
    inputs = task.prepare(batch, input_device(model))

    def observe_part(part: RowSamples, part_requests: Sequence[Request], show: See | None, sample: int) -> Observation:
        view = View(model, task, sites, part.batch, part, labels, number, first + sample)
        return _observe(view, part_requests, show, check=check and sample == 0)

    rows = RowSamples(model, task, inputs)
    try:
        try:
            return observe_part(rows, distinct, see, 0)
        except UnverifiedRowsError:
            rows.verify(sites)
            return observe_part(rows, distinct, see, 0)
    except NotPerSampleError:
        # Rows that cannot be separated by sample, or that all samples share (DeBERTa's positions with share_att_key):
        # then gradients per sample need one sample at a time. Gradients of the whole batch do not.
        whole = [request for request in distinct if request.backward is not None and request.backward[1] == "batch"]
        rest = [request for request in distinct if request not in whole]
        singles = [task.select(inputs, slice(row, row + 1)) for row in range(rows.size)]
        try:
            parts = [observe_part(RowSamples(model, task, each), rest, see, row) for row, each in enumerate(singles)]
        except (RuntimeError, ValueError, IndexError):
            for single in singles:
                refuse_inseparable(model, task, single)
            raise
        answers = {
            request: torch.cat([part.answers[request] for part in parts], dim=-3) for request in parts[0].answers
        }
        if whole:
            answers.update(observe_part(rows, whole, None, 0).answers)
        gathered: dict[SiteRequest, dict[int, Any]] = {request: {} for request in parts[0].gathered}
        for part in parts:
            for request, values in part.gathered.items():
                add_gathered(gathered[request], values)
        reached = frozenset[int]().union(*(part.reached for part in parts))
        uncertain = frozenset[int]().union(*(part.uncertain for part in parts))
        return Observation(answers, gathered, sum(part.tokens for part in parts), reached, uncertain)


def add_gathered(total: dict[int, Any], more: Mapping[int, Any]) -> None:
    """Add gathered values to the totals of their sites."""
    for index, values in more.items():
        total[index] = total[index] + values if index in total else values


def _observe(view: View, requests: Sequence[Request], see: See | None, *, check: bool) -> Observation:
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
        expected = _logits_to_compare(view) if check and any(map(_reads_probabilities, meters.values())) else None
        _attach(stack, view, list(meters.values()), tokens, check=check)
        needs_targets = any(request.needs_labels for request in requests)
        output: Any = None
        logits: Any = None
        targets: torch.Tensor | None = None
        if see is None and not backwards and not needs_targets and expected is None:  # no logits needed
            model(**few_logits(model, task.inputs(batch)))
        else:
            output = forward(model, task, task.inputs(batch))
            logits = view.rows.of_logits(logits_of(task, output))
            targets = targets_of(task, batch, logits, view.labels) if needs_targets else None
            _run_backward(
                view,
                meters,
                logits,
                targets,
                [backward_pass for backward_pass in backwards if backward_pass[1] < draws_for(logits)],
            )
            logits = logits if isinstance(logits, States) else logits.detach()
    if expected is not None and torch.isfinite(expected).all():
        refuse_changed_outputs(model, [expected], [_at_real_tokens(view, logits)])
    del expected
    if see is not None:  # after the hooks are removed, since it may run the model itself
        with torch.no_grad(), evaluating(model):
            see(batch, output, logits)
    del output, logits
    with evaluating(model), frozen(model):
        for meter in meters.values():
            meter.after(targets)
    removed = ~kept_mask(view.sites)
    answers = {
        request: _with_nan(meter.answer(), removed)
        for request, meter in meters.items()
        if not isinstance(meter, SiteMeter)
    }
    gathered = {meter.request: meter.gathered for meter in meters.values() if isinstance(meter, SiteMeter)}
    return Observation(
        answers, gathered, tokens.count, *map(frozenset, (tokens.reached.sites, tokens.reached.uncertain))
    )


def _run_backward(
    view: View,
    meters: Mapping[Request, Meter],
    logits: Any,
    targets: torch.Tensor | None,
    backwards: Sequence[tuple[Backward, int]],
) -> None:
    """One backward pass after the other, each for its meters."""
    for number, (backward, draw) in enumerate(backwards, start=1):
        root, gradient = start_backward(*backward, view.task, logits, targets, view.batch, draw=draw)
        view.backward, view.draw = backward, draw
        current = [meter for meter in meters.values() if meter.is_current]
        for meter in current:
            meter.start()
        if root.requires_grad:  # a model without any unit left has nothing to differentiate
            root.backward(gradient, retain_graph=number < len(backwards))
        del root, gradient
        for meter in current:
            meter.finish()
    view.backward = None


def _with_nan(answer: torch.Tensor, removed: torch.Tensor) -> torch.Tensor:
    return answer.masked_fill(removed.to(answer.device), torch.nan)


def _reads_probabilities(meter: Meter) -> bool:
    return meter.probabilities is not None or meter.rows is not None


def _logits_to_compare(view: View) -> torch.Tensor:
    """The logits of the model without hooks."""
    device = input_device(view.model)
    # The pass that follows draws the same random numbers, where a model draws any in eval mode.
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        output = forward(view.model, view.task, view.task.inputs(view.batch))
        return _at_real_tokens(view, view.rows.of_logits(logits_of(view.task, output)))


def _at_real_tokens(view: View, logits: torch.Tensor | States) -> torch.Tensor:
    """Logits, or the hidden states of large ones, with zeros at padding, where attention implementations differ."""
    values = (logits.hidden if isinstance(logits, States) else logits).detach()
    if values.dim() != 3:
        return values
    return values.masked_fill(~view.task.real_tokens(view.batch, values).unsqueeze(-1), 0)


def _attach(stack: ExitStack, view: View, meters: Sequence[Meter], tokens: _TokenCount, *, check: bool) -> None:
    """One set of hooks for all meters."""
    projections = [meter.projection for meter in meters if meter.projection is not None]
    outputs = [*(meter.output for meter in meters if meter.output is not None), tokens.output]
    maps = [meter.probabilities for meter in meters if meter.probabilities is not None]
    blocks = [meter.rows for meter in meters if meter.rows is not None]
    stack.enter_context(
        site_callbacks(
            view.model,
            view.sites,
            projection=(lambda *args: _call_all(projections, *args)) if projections else None,
            output=lambda *args: _call_all(outputs, *args),
        )
    )
    for meter in meters:
        stack.enter_context(meter.watching())
    if maps or blocks:

        def show(site: Site, rows: Rows) -> None:
            _call_all(blocks, site, rows)
            _call_all(maps, site, rows.probabilities, rows.mask)

        heads = [site for site in view.sites if site.attention]
        stack.enter_context(probabilities(view.model, heads, show, whole=bool(maps), check=check))


def _call_all(callbacks: Sequence[Callable[..., None]], *args: Any) -> None:
    for callback in callbacks:
        callback(*args)


class _TokenCount:
    """Real tokens of the batch, as the first site that runs sees them: patches of an image, frames of a sound. Also
    the sites that any token reached."""

    def __init__(self, view: View) -> None:
        self.view, self.count, self._site = view, 0, -1
        self.reached = Reached(view.task, view.batch)

    def output(self, site: Site, columns: torch.Tensor) -> None:
        self.reached.add(site, columns)
        if self._site < 0:
            self._site = site.index
            tokens = columns.shape[:-1].numel()
            real = self.view.real(site, tokens // self.view.size)
            self.count = tokens if real is None else int(real.sum())
