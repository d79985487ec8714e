"""Rows of the last layer that nobody reads are not computed.

A classifier that looks at one token of its last layer needs the keys and values of all tokens there, and of that one
token its query and everything behind attention. Which rows are read is found by a gradient, and proven each time: what
is left out is NaN, and a NaN that anything reads reaches the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headprune.hooks.calls import standing_in
from headprune.hooks.outputs import evaluating
from headprune.hooks.watch import frozen, hooks
from headprune.tasks import Task
from headprune.units import AttentionSite, Site
from headprune.units.paths import layer_path, submodule

WORTHWHILE = 0.5  # of the rows at most are read; else there is little to leave out


@dataclass(frozen=True)
class Read:
    """What is read of the last layer in one batch."""

    layer: str
    queries: tuple[str, ...]  # the linear maps that make queries and nothing else
    maps: tuple[str, ...]  # those behind its attention, in the order in which they run
    shape: torch.Size  # [samples x tokens]
    rows: torch.Tensor  # that are read, of samples times tokens

    @contextmanager
    def only(self, model: nn.Module, fill: float = torch.nan, *, queries: bool = False) -> Iterator[None]:
        """These maps compute the rows that are read for the length of the block, and give `fill` for the others. Those
        of `queries` do so where nobody wants to see what attention gives for other rows."""
        paths = (*self.queries, *self.maps) if queries else self.maps
        found = [submodule(model, path) for path in paths]  # which may have left with the last unit of its site
        there = [module for module in found if module is not None]
        with standing_in([(module, self._some_rows(module, fill)) for module in there]):
            yield

    def _some_rows(self, module: Any, fill: float) -> Callable[[torch.Tensor], torch.Tensor]:
        compute = module.forward

        def forward(given: torch.Tensor) -> torch.Tensor:
            if given.shape[:-1] != self.shape:
                return compute(given)
            rows = self.rows.to(given.device)
            made = compute(given.flatten(0, 1).index_select(0, rows))
            whole = made.new_full((self.shape.numel(), made.shape[-1]), fill)
            return whole.index_copy(0, rows, made).unflatten(0, self.shape)

        return forward


class Unread:
    """What is read in each of some batches that go through a model again and again, looked up once for each."""

    def __init__(self, *, prove: bool = False) -> None:
        """With `prove` nothing is left out of a batch before a pass of its own has shown that nobody reads it."""
        self.prove = prove
        self._last: str | None = ""  # path of the layer that runs last; empty before it is looked up
        self._found: dict[int, Read | None] = {}  # by the batch's number

    def of(
        self, number: int, model: PreTrainedModel, sites: Sequence[Site], task: Task, batch: Mapping[str, Any]
    ) -> Read | None:
        """What is read of a batch that is on the model's device; None where it is most, or cannot be told."""
        if number not in self._found:
            with evaluating(model), frozen(model):
                self._found[number] = self._find(model, sites, task, batch)
        return self._found[number]

    def disproven(self, number: int) -> None:
        """What was left out of this batch has been read after all: a query, or else what comes behind attention."""
        found = self._found[number]
        self._found[number] = replace(found, queries=()) if found is not None and found.queries else None

    def _find(self, model: PreTrainedModel, sites: Sequence[Site], task: Task, batch: Mapping[str, Any]) -> Read | None:
        if task.per_token or any(site.applications > 1 for site in sites) or torch.is_inference_mode_enabled():
            return None
        if self._last == "":
            paths = dict.fromkeys(layer_path(site.path) for site in sites)
            self._last = _last(model, {path: model.get_submodule(path) for path in paths}, task.inputs(batch))
        if self._last is None:
            return None
        own = [site for site in sites if isinstance(site, AttentionSite) and layer_path(site.path) == self._last]
        found = _read(model, self._last, own, task, batch)
        if found is None or not self.prove:
            return found
        with torch.no_grad(), found.only(model):
            logits = task.logits(model(**task.inputs(batch)))
        return found if torch.isfinite(logits).all() else None


def _last(model: PreTrainedModel, layers: Mapping[str, nn.Module], inputs: Mapping[str, Any]) -> str | None:
    """The path of the layer that runs last, if it runs once."""
    order: list[str] = []

    def noting(path: str, layer: Any) -> Callable[..., Any]:
        compute = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            order.append(path)
            return compute(*args, **kwargs)

        return forward

    # No hooks: a layer that remembers what it gave would be another one with them.
    with torch.no_grad(), standing_in([(layer, noting(path, layer)) for path, layer in layers.items()]):
        model(**inputs)
    return order[-1] if order and order.count(order[-1]) == 1 else None


def _read(
    model: PreTrainedModel, last: str, sites: Sequence[AttentionSite], task: Task, batch: Mapping[str, Any]
) -> Read | None:
    layer: Any = model.get_submodule(last)
    compute = layer.forward
    streams: list[torch.Tensor] = []
    maps: list[tuple[str, torch.Size]] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = compute(*args, **kwargs)
        parts = output if isinstance(output, tuple) else (output,)
        if not isinstance(parts[0], torch.Tensor) or not parts[0].is_floating_point():
            return output
        streams.append(parts[0].detach().requires_grad_())
        given = streams[0].clone()  # which whoever reads it may write to, unlike what the gradient is taken at
        return (given, *parts[1:]) if isinstance(output, tuple) else given

    def note(path: str) -> Callable[..., None]:
        return lambda module, args, output: maps.append((path, args[0].shape if args else torch.Size()))

    linear = [(part, note(f"{last}.{name}")) for name, part in layer.named_modules() if _is_linear(part)]
    with torch.enable_grad(), standing_in([(layer, forward)]), hooks(linear):
        logits = task.logits(model(**task.inputs(batch)))
    if len(streams) != 1 or streams[0].dim() != 3 or logits.dim() != 2 or not logits.requires_grad:
        return None
    signs = torch.randint(0, 2, logits.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    (gradient,) = torch.autograd.grad(logits, streams[0], signs.to(logits))
    shape = gradient.shape[:2]
    rows = (gradient != 0).any(-1).flatten().nonzero().flatten()
    outputs = {site.o for site in sites}
    behind = max((place for place, (path, _) in enumerate(maps) if path in outputs), default=0)
    ran = [path for path, given in maps[behind:] if given[:-1] == shape]
    before = [path for path, given in maps[:behind] if given[:-1] == shape]
    asking = tuple(path for path in _query_maps(sites) if before.count(path) == 1)
    if not ran or len(set(ran)) < len(ran) or not 0 < len(rows) <= WORTHWHILE * shape.numel():
        return None
    return Read(last, asking, tuple(ran), shape, rows)


def _query_maps(sites: Sequence[AttentionSite]) -> list[str]:
    """Those that make queries, and neither keys nor values."""
    roles: dict[str, set[str]] = {}
    for site in sites:
        for projection in site.roles:
            roles.setdefault(projection.module, set()).add(projection.role)
    return [path for path, own in roles.items() if own == {"q"}]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, Conv1D))
