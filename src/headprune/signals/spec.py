"""Interfaces of signals: a request, which is a value, and the meter that answers it during a pass.

A criterion names its requests; equal requests share an answer, and those with the same backward pass share that pass. A
new signal is a new file with a request and its meter. Most requests are answered by a number per sample and member. A
`SiteRequest` gathers something larger at each site, which adds up over batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from transformers import PreTrainedModel

from headprune.hooks.attention_blocks import Rows
from headprune.hooks.module_paths import pattern
from headprune.signals.row_samples import NotPerSampleError, RowSamples
from headprune.tasks import Labels, Task
from headprune.units import Kind, Site, kept_mask

Objective = Literal["logit-norm", "loss", "logit-signs"]
Aggregation = Literal["sample", "batch"]
Backward = tuple[Objective, Aggregation]


@dataclass
class View:
    """The state of a pass, for its meters."""

    model: PreTrainedModel
    task: Task
    sites: Sequence[Site]
    batch: Mapping[str, Any]  # on the model's device, with the decoder's inputs
    rows: RowSamples  # of this batch
    labels: Labels = "given"
    number: int = 0  # of the batch
    first: int = 0  # number of its first sample in all the data
    backward: Backward | None = None  # the backward pass that runs now
    draw: int = 0  # of random signs, for this backward pass

    @property
    def size(self) -> int:
        """The number of samples."""
        return self.rows.size

    def blank(self, *lead: int, size: int | None = None) -> torch.Tensor:
        """Zeros [lead x batch x sites x members]."""
        kept = kept_mask(self.sites)
        dtype = torch.promote_types(next(self.model.parameters()).dtype, torch.float32)
        return torch.zeros(*lead, self.size if size is None else size, *kept.shape, dtype=dtype)

    def per_sample(self, tensor: torch.Tensor, site: Site, path: str | None = None) -> torch.Tensor:
        """[samples, tokens, features] of an activation at the output map of a site, or at the map at `path`, whatever
        the axes before the features; samples with fewer tokens than others have zeros after them.

        A sample may be several rows of the model (multiple choice): they are its tokens one after the other. An
        expert's tokens are in no order of samples, so they need a batch of one sample.
        """
        self.check_order(site, tensor)
        return self.rows.split(path or site.o, tensor.detach())

    def check_order(self, site: Site, tensor: torch.Tensor) -> None:
        """Raise where the rows of an activation are in no order of samples: tokens that were sent to an expert."""
        if tensor.dim() == 2 and is_expert(site) and self.size > 1:
            raise NotPerSampleError

    def real(self, site: Site, tokens: int) -> torch.Tensor | None:
        """Bool [samples x tokens], for tokens as `per_sample` gives them; None where all count."""
        rows = self.task.rows(self.batch)
        mask = self.task.site_tokens(site, self.batch, tokens // rows)
        return None if mask is None or mask.numel() != self.size * tokens else mask.reshape(self.size, tokens)

    def token_counts(self, site: Site, tokens: int) -> torch.Tensor:
        """[samples x 1]: how many of these tokens are real, at least 1."""
        real = self.real(site, tokens)
        return torch.full((self.size, 1), tokens) if real is None else real.sum(1, keepdim=True).clamp_min(1).cpu()


class Meter:
    """Reduces activations or gradients to one number per sample and member as soon as they appear, to save memory.

    `projection`, `output`, `probabilities` and `rows` are called while the model runs, where a meter has them; `start`
    and `finish` around the backward pass of its request; `after` when the pass is over. `rows` shows attention in
    blocks of queries, in order, so that no whole map is made; `probabilities` shows it at once.
    """

    projection: Callable[[Site, str, torch.Tensor, torch.Tensor], None] | None = None
    output: Callable[[Site, torch.Tensor], None] | None = None
    probabilities: Callable[[Site, torch.Tensor, torch.Tensor | None], None] | None = None
    rows: Callable[[Site, Rows], None] | None = None

    def __init__(self, request: Any, view: View) -> None:
        self.request, self.view = request, view

    def watching(self) -> AbstractContextManager[None]:
        """Further hooks, for what the callbacks do not show."""
        return nullcontext()

    def start(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def after(self, targets: torch.Tensor | None) -> None:
        pass

    @property
    def is_current(self) -> bool:
        """Whether the backward pass that runs now is one of this request."""
        return self.view.backward == self.request.backward and self.view.draw < self.request.draws

    def answer(self) -> torch.Tensor:
        """[.. x batch x sites x members]; values of removed members are ignored."""
        raise NotImplementedError


@dataclass(frozen=True)
class Request:
    """Answered by a tensor [batch x sites x members] in original ids, NaN at removed members."""

    needs: ClassVar[tuple[str, ...]] = ("data",)  # for messages, and for checks before anything runs
    kinds: ClassVar[tuple[Kind, ...]] = ("heads",)  # the kinds of units that it covers

    @property
    def backward(self) -> Backward | None:
        """The backward pass it reads gradients from."""
        return None

    @property
    def draws(self) -> int:
        """How many backward passes, each with other random signs, it reads gradients from."""
        return 1

    @property
    def needs_labels(self) -> bool:
        return self.backward is not None and self.backward[0] == "loss"

    def meter(self, view: View) -> Meter:
        raise NotImplementedError


@dataclass(frozen=True)
class GradientRequest(Request):
    """Reads gradients of an objective; requests with the same objective and aggregation share the backward pass."""

    needs: ClassVar[tuple[str, ...]] = ("gradients",)
    objective: Objective = "loss"
    aggregation: Aggregation = "sample"

    @property
    def backward(self) -> Backward:
        return self.objective, self.aggregation


class SiteMeter(Meter):
    """Gathers something at sites, in `gathered` by their index. Values of two batches, or of two processes, are added
    with `+`."""

    def __init__(self, request: SiteRequest, view: View) -> None:
        super().__init__(request, view)
        self.gathered: dict[int, Any] = {}
        self.sites = [site for site in view.sites if site.kept and site.index in request.sites]


@dataclass(frozen=True)
class SiteRequest(Request):
    """Answered by the values gathered at these sites, by their index."""

    kinds: ClassVar[tuple[Kind, ...]] = ("heads", "neurons")
    sites: frozenset[int] = frozenset()

    def bytes_per_token(self, model: PreTrainedModel, site: Site) -> int:
        """Bytes kept per token at a site, so that no more sites are gathered at once than memory allows."""
        raise NotImplementedError

    def meter(self, view: View) -> SiteMeter:
        raise NotImplementedError


def is_expert(site: Site) -> bool:
    """Whether it may be one of several experts of a layer, each with its own tokens."""
    return site.kind == "neurons" and pattern(site.path).count("*") > 1


def unit_sums(site: Site, values: torch.Tensor) -> torch.Tensor:
    """Values [.. x members] summed over the members of each unit, the sum at every member."""
    if site.group == 1:
        return values
    return values.unflatten(-1, (-1, site.group)).sum(-1).repeat_interleave(site.group, dim=-1)
