"""Counting a forward pass by running it on fake tensors, which have shapes and no numbers."""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from headprune.hooks.attach import hooks
from headprune.hooks.offload import undress
from headprune.hooks.torch_attention import expose
from headprune.measure.examples import Inputs, default_tokens
from headprune.units import Axis, Site
from headprune.units.cutting.record import NAMES


def _grouped_products(rows: Any, maps: Any, *args: Any, **options: Any) -> int:
    """Every row [rows, in] is multiplied by one of the maps [maps, in, out]."""
    return 2 * math.prod(rows) * int(maps[-1])


FORMULAS = {torch.ops.aten._grouped_mm: _grouped_products}  # a layer of experts, which torch's counter does not know
# One mode for all: some families keep what they compute by shape, device and type, and modes do not mix. Fake tensors
# are on the meta device, so that none of that is ever taken for the real thing.
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
MAPS = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d)


@dataclass(frozen=True)
class Counted:
    """FLOPs of one forward pass: per unit of each site, and of all that does not leave with units."""

    tokens: int
    units: tuple[int, ...]
    rest: int


# What a unit costs does not depend on how many there are, so one count serves for all steps of a run, and for every
# model of the same structure.
_known: OrderedDict[Any, Counted | None] = OrderedDict()
REMEMBERED = 64  # structures


def count(model: PreTrainedModel, sites: Sequence[Site], choices: Iterable[Inputs]) -> Counted | None:
    """The count on the first of these inputs that the model runs on so that every site is reached; None if there is
    none, or if the forward cannot run without numbers."""
    choices = list(choices)
    shapes = tuple(tuple((name, tuple(value.shape)) for name, value in inputs.items()) for inputs in choices)
    key = (shapes, _structure(model, sites))
    counted = _known.get(key)
    # A site that was empty when it was counted may have its units back.
    fits = counted is None or all(cost or not site.kept for cost, site in zip(counted.units, sites, strict=True))
    if key not in _known or not fits:
        counted = next((found for inputs in choices if (found := _run(model, sites, inputs)) is not None), None)
        _known[key] = counted
    _known.move_to_end(key)
    while len(_known) > REMEMBERED:
        _known.popitem(last=False)
    return counted


def _structure(model: PreTrainedModel, sites: Sequence[Site]) -> Any:
    """All that decides what a pass computes and does not change when units go: the class, its settings, the shapes of
    what stays, and what a unit is."""
    cut = {path for site in sites for path in (*site.maps, site.o)}
    cut_tensors = {axis.tensor for site in sites for axis in site.axes}
    settings = {name: value for name, value in model.config.to_dict().items() if name not in NAMES.values()}
    shapes = tuple(
        (name, tuple(parameter.shape))
        for name, parameter in model.named_parameters()
        if name.rpartition(".")[0] not in cut and name not in cut_tensors
    )
    units = tuple((site.kind, site.width, site.group, site.original, site.applications) for site in sites)
    return type(model), repr(settings), shapes, units


def _run(model: PreTrainedModel, sites: Sequence[Site], inputs: Inputs) -> Counted | None:
    log = logging.getLogger(FakeTensorMode.__module__)
    disabled, log.disabled = log.disabled, True
    try:
        # A count does not depend on the precision, and some kernels (those of experts) know only one.
        for dtype in (None, torch.bfloat16):
            # Whatever goes wrong here (a value is asked for, a kernel is missing), the caller has another way to count.
            with suppress(Exception):
                return _count(model, sites, inputs, dtype)
    finally:
        log.disabled = disabled
    return None


def _count(model: PreTrainedModel, sites: Sequence[Site], inputs: Inputs, dtype: torch.dtype | None) -> Counted | None:
    """A copy runs, since a forward may keep tensors that it made, and the model must not find fake ones later."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    meter = _Meter(counter)
    present = [site for site in sites if site.kept]
    parts = [_Parts(model, site) for site in sites]
    watched = {path for part in parts for path in part.watched}
    # Fake and not only meta tensors: transformers knows them, and does not ask for their values.
    with torch.no_grad(), FAKE, ExitStack() as stack:
        weights: dict[int, Any] = {
            **{id(value): nn.Parameter(_fake(value, dtype), requires_grad=False) for value in model.parameters()},
            **{id(value): _fake(value, dtype) for value in model.buffers()},
        }
        twin = copy.deepcopy(model, weights).eval()
        expose(twin)
        _drop_hooks(twin)
        modules = [(path, twin.get_submodule(path)) for path in watched]
        stack.enter_context(hooks([(module, meter.start) for _, module in modules], before=True))
        stack.enter_context(hooks([(module, meter.stop(path)) for path, module in modules]))
        with counter:
            twin(**{name: _fake(value, dtype or model.dtype) for name, value in inputs.items()}, **options)
    if any(site.o not in meter.rows for site in present):
        return None
    units = []
    for site, part in zip(sites, parts, strict=True):
        cost, left = divmod(part.flops(meter.flops), max(site.size // site.group, 1))
        if left:
            return None
        units.append(cost)
    rest = counter.get_total_flops() - sum(
        cost * (site.size // site.group) for cost, site in zip(units, sites, strict=True)
    )
    text = inputs.get("input_ids")
    positions = meter.rows[present[0].o] if present else default_tokens(model)
    return Counted(positions if text is None else int(text.shape[1]), tuple(units), rest)


def _drop_hooks(model: nn.Module) -> None:
    """Whoever watches the model, or changes what flows through it, has not asked for this pass."""
    for module in model.modules():
        undress(module)
        for hooks_of in (module._forward_hooks, module._forward_pre_hooks):
            hooks_of.clear()


def _fake(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


class _Parts:
    """The modules that say what the units of a site compute."""

    def __init__(self, model: PreTrainedModel, site: Site) -> None:
        self.axes: dict[str, Axis] = {}  # of a map that has something of every unit
        self.attention = ""  # what it computes besides its maps is attention
        self.inside: list[str] = []
        if not site.kept:
            return
        for axis in site.axes:  # a convolution between the maps of neurons has a channel of each
            if isinstance(model.get_submodule(axis.module), MAPS):
                self.axes.setdefault(axis.module, axis)
        if site.attention:
            self.attention = site.path
            self.inside = [f"{site.path}.{name}" for name in _maps(model, site.path)]

    @property
    def watched(self) -> set[str]:
        return {path for path in (self.attention, *self.axes, *self.inside) if path}

    def flops(self, seen: dict[str, int]) -> int:
        """What all units of the site compute, from what its modules were seen to."""
        # Rows that units share stay when units go.
        own = sum(seen.get(path, 0) * axis.owned // axis.length for path, axis in self.axes.items())
        if self.attention:
            own += seen[self.attention] - sum(seen.get(path, 0) for path in self.inside)
        return own


def _maps(model: PreTrainedModel, path: str) -> list[str]:
    """Linear maps and convolutions inside a module."""
    return [name for name, inner in model.get_submodule(path).named_modules() if name and isinstance(inner, MAPS)]


class _Meter:
    """FLOPs between the beginning and the end of modules, and the rows of what they are given."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self.counter = counter
        self.flops: dict[str, int] = {}
        self.rows: dict[str, int] = {}
        self._begun: list[int] = []

    def start(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._begun.append(self.counter.get_total_flops())

    def stop(self, path: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.flops[path] = self.flops.get(path, 0) + self.counter.get_total_flops() - self._begun.pop()
            if args and isinstance(args[0], torch.Tensor):
                self.rows[path] = math.prod(args[0].shape[:-1])

        return note
