"""Sublayers, to be timed alone: the smallest module around a site that a forward pass calls, with other numbers of
units in it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.hooks.module_calls import ModuleCall, Trace, detached_copy, tracing
from headprune.hooks.outputs import evaluating
from headprune.measure.timing import TimedCall
from headprune.surgery.remove_units import remove_units
from headprune.units import Member, Site

ALL_COUNTS = 16  # units: up to so many, every number of them is timed
STEPS = 12  # else so many steps, and a small one to begin with


@dataclass(frozen=True)
class Sublayer:
    """Sites that take the same time: equal in their modules, shapes and inputs."""

    module: str  # path of the module to time, around the first of the sites
    sites: tuple[int, ...]
    counts: tuple[int, ...]  # units to time it with, ascending; the first is the fewest that may be left


def sublayers(model: PreTrainedModel, sites: Sequence[Site], inputs: dict[str, Any]) -> list[Sublayer]:
    """The sites that these inputs reach, one entry for all that are equal."""
    trace = record_calls(model, inputs, {path for site in sites if site.kept for path in _enclosing_modules(site)})
    groups: dict[Any, list[Site]] = {}
    modules: dict[int, str] = {}
    for site in sites:
        module = next((path for path in _enclosing_modules(site) if path in trace.calls), None) if site.kept else None
        if module is not None:
            modules[site.index] = module
            groups.setdefault(_signature(model, site, module, trace.calls[module]), []).append(site)
    return [
        Sublayer(modules[group[0].index], tuple(site.index for site in group), counts_of(group[0]))
        for group in groups.values()
    ]


def record_calls(model: PreTrainedModel, inputs: dict[str, Any], paths: set[str]) -> Trace:
    """The first call of each of these modules in a forward pass."""
    with torch.no_grad(), evaluating(model), tracing(model, sorted(paths), []) as trace:
        model(**inputs)
    return trace


def counts_of(site: Site) -> tuple[int, ...]:
    """The numbers of units with which a site is timed."""
    units, fewest = site.size // site.group, fewest_of(site)
    if units <= ALL_COUNTS:
        return tuple(range(fewest, units + 1))
    steps = (units * step / STEPS for step in range(1, STEPS))
    return tuple(
        sorted({fewest, max(units // 64, 1), *(typical_count(step) for step in steps), typical_count(units - 1), units})
    )


def typical_count(count: float) -> int:
    """A number near this one that is no multiple of 8 beyond small ones: pruning seldom leaves such widths, and they
    are faster than others."""
    near = round(count)
    return near if near <= ALL_COUNTS else near - near % 8 - 3


def fewest_of(site: Site) -> int:
    """Units that must stay."""
    if site.obstacle:
        return site.size // site.group
    return 1 if site.obstacle_to_emptying else 0


def timed_sublayer(
    model: PreTrainedModel, sites: Sequence[Site], module: str, call: ModuleCall, site: int, count: int
) -> TimedCall:
    """The module of a site with `count` of its units; other sites in it have as few as they can, so that they add
    little time."""
    others = [
        other for other in sites if other.index != site and f"{other.path}.".startswith(f"{module}." if module else "")
    ]
    left = {site: count, **{other.index: fewest_of(other) for other in others if other.kept}}
    return TimedCall(with_units(model, sites, left).get_submodule(module), call.args, call.kwargs, detached_copy)


def with_units(model: PreTrainedModel, sites: Sequence[Site], left: dict[int, int]) -> PreTrainedModel:
    """A copy with this number of units left at these sites, the first ones; other weights share their memory."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, dict(shared)).eval()
    remove_units(twin, [member for index, count in left.items() for member in _members_after(sites[index], count)])
    return twin


def _members_after(site: Site, count: int) -> list[Member]:
    return [member for unit in site.units()[count:] for member in unit]


def _enclosing_modules(site: Site) -> list[str]:
    """Modules around all parts of a site, the smallest first, the model itself last."""
    paths = [path.split(".") for path in (site.path, site.o, *site.maps)]
    shared = 0
    while all(len(path) > shared and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    return [".".join(paths[0][:length]) for length in range(shared, -1, -1)]


def _signature(model: nn.Module, site: Site, path: str, call: ModuleCall) -> Any:
    module = model.get_submodule(path)
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    site_shape = (site.kind, site.place, site.size, site.group, site.applications, fewest_of(site))
    return type(module), type(model.get_submodule(site.path)), site_shape, shapes, _shapes((call.args, call.kwargs))


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(_shapes(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _shapes(item)) for name, item in sorted(value.items()))
    return None
