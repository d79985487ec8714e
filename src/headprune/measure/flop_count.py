"""Counts the FLOPs of a forward pass by running it on fake tensors, which have shapes and no values."""

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
from headprune.hooks.offload import remove_accelerate_hook
from headprune.hooks.torch_attention import expose
from headprune.measure.dummy_inputs import Inputs, default_tokens
from headprune.units import Axis, Site
from headprune.units.slicing.record import NAMES


def _grouped_products(rows: Any, maps: Any, *args: Any, **options: Any) -> int:
    """Every row [rows, in] is multiplied by one of the maps [maps, in, out]."""
    return 2 * math.prod(rows) * int(maps[-1])


FORMULAS = {torch.ops.aten._grouped_mm: _grouped_products}  # a layer of experts, which torch's counter does not know
# One mode for all counts: some families cache tensors by shape, device and dtype, and fake tensors of different modes
# cannot be mixed. They are on the meta device, so that a cached one is never used in a real pass.
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
MAPS = (nn.Linear, Conv1D, nn.Conv1d, nn.Conv2d)


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one forward pass: per unit of each site, and of everything else."""

    tokens: int
    units: tuple[int, ...]
    rest: int


# The cost of a unit does not depend on how many there are, so one count serves all steps of a run, and every model of
# the same structure.
_cache: OrderedDict[Any, FlopCount | None] = OrderedDict()
CACHE_SIZE = 64  # structures


def count(model: PreTrainedModel, sites: Sequence[Site], choices: Iterable[Inputs]) -> FlopCount | None:
    """The count on the first of these inputs that the model runs on so that every site is reached; None if there is
    none, or if the forward cannot run without numbers."""
    choices = list(choices)
    shapes = tuple(tuple((name, tuple(value.shape)) for name, value in inputs.items()) for inputs in choices)
    key = (shapes, _structure(model, sites))
    counted = _cache.get(key)
    # A site that was empty when it was counted may have its units back.
    fits = counted is None or all(cost or not site.kept for cost, site in zip(counted.units, sites, strict=True))
    if key not in _cache or not fits:
        counted = next((result for inputs in choices if (result := _run(model, sites, inputs)) is not None), None)
        _cache[key] = counted
    _cache.move_to_end(key)
    while len(_cache) > CACHE_SIZE:
        _cache.popitem(last=False)
    return counted


def _structure(model: PreTrainedModel, sites: Sequence[Site]) -> Any:
    """All that decides the cost of a pass and does not change when units are removed: the class, its settings, the
    shapes of other weights, and the size of a unit."""
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


def _run(model: PreTrainedModel, sites: Sequence[Site], inputs: Inputs) -> FlopCount | None:
    log = logging.getLogger(FakeTensorMode.__module__)
    disabled, log.disabled = log.disabled, True
    try:
        # A count does not depend on the precision, and some kernels (those of experts) have only one.
        for dtype in (None, torch.bfloat16):
            # Whatever fails here (the forward needs a value, a kernel is missing), the caller falls back to the
            # weights.
            with suppress(Exception):
                return _count(model, sites, inputs, dtype)
    finally:
        log.disabled = disabled
    return None


def _count(
    model: PreTrainedModel, sites: Sequence[Site], inputs: Inputs, dtype: torch.dtype | None
) -> FlopCount | None:
    """Runs a copy, since a forward may cache tensors, and the model must not use fake ones later."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    meter = _Meter(counter)
    present = [site for site in sites if site.kept]
    parts = [_Parts(model, site) for site in sites]
    watched = {path for part in parts for path in part.watched}
    # Fake and not only meta tensors: transformers recognises them, and does not read their values.
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
    return FlopCount(positions if text is None else int(text.shape[1]), tuple(units), rest)


def _drop_hooks(model: nn.Module) -> None:
    """Hooks of the user are not meant for this pass."""
    for module in model.modules():
        remove_accelerate_hook(module)
        for hooks_of in (module._forward_hooks, module._forward_pre_hooks):
            hooks_of.clear()


def _fake(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=dtype, device="meta")


class _Parts:
    """The modules whose FLOPs are those of the units of a site."""

    def __init__(self, model: PreTrainedModel, site: Site) -> None:
        self.axes: dict[str, Axis] = {}  # of a map with rows or columns of every unit
        self.attention = ""  # the module whose FLOPs outside of its maps are those of attention
        self.inside: list[str] = []
        if not site.kept:
            return
        for axis in site.axes:  # a convolution between the maps of neurons has a channel per neuron
            if isinstance(model.get_submodule(axis.module), MAPS):
                self.axes.setdefault(axis.module, axis)
        if site.attention:
            self.attention = site.path
            self.inside = [f"{site.path}.{name}" for name in _maps(model, site.path)]

    @property
    def watched(self) -> set[str]:
        return {path for path in (self.attention, *self.axes, *self.inside) if path}

    def flops(self, counted: dict[str, int]) -> int:
        """FLOPs of all units of the site, from those counted at its modules."""
        # Rows that units share stay when units are removed.
        total = sum(counted.get(path, 0) * axis.owned // axis.length for path, axis in self.axes.items())
        if self.attention:
            total += counted[self.attention] - sum(counted.get(path, 0) for path in self.inside)
        return total


def _maps(model: PreTrainedModel, path: str) -> list[str]:
    """Linear maps and convolutions inside a module."""
    return [name for name, inner in model.get_submodule(path).named_modules() if name and isinstance(inner, MAPS)]


class _Meter:
    """FLOPs between the beginning and the end of modules, and the rows of their inputs."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self.counter = counter
        self.flops: dict[str, int] = {}
        self.rows: dict[str, int] = {}
        self._starts: list[int] = []

    def start(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._starts.append(self.counter.get_total_flops())

    def stop(self, path: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.flops[path] = self.flops.get(path, 0) + self.counter.get_total_flops() - self._starts.pop()
            if args and isinstance(args[0], torch.Tensor):
                self.rows[path] = math.prod(args[0].shape[:-1])

        return record
