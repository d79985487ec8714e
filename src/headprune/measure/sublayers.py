"""The part of a model that one site is, to be timed alone: the smallest module around it that a forward pass calls,
with other numbers of units in it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.hooks.outputs import evaluating
from headprune.hooks.recorded_calls import Call, Trace, copied, tracing
from headprune.measure.timing import Timed
from headprune.surgery.remove_units import remove_units
from headprune.units import Member, Site

ALL_COUNTS = 16  # units: up to so many, every number of them is timed
STEPS = 12  # else so many steps, and a small one to begin with


@dataclass(frozen=True)
class Sublayer:
    """Sites that take the same time: alike in their modules, their shapes and what they are called with."""

    home: str  # module to time, around the first of the sites
    sites: tuple[int, ...]
    counts: tuple[int, ...]  # units to time it with, ascending; the first is the fewest that may be left


def sublayers(model: PreTrainedModel, sites: Sequence[Site], inputs: dict[str, Any]) -> list[Sublayer]:
    """The sites that these inputs reach, one entry for all that are alike."""
    trace = called(model, inputs, {path for site in sites if site.kept for path in _around(site)})
    alike: dict[Any, list[Site]] = {}
    homes: dict[int, str] = {}
    for site in sites:
        home = next((path for path in _around(site) if path in trace.calls), None) if site.kept else None
        if home is not None:
            homes[site.index] = home
            alike.setdefault(_likeness(model, site, home, trace.calls[home]), []).append(site)
    return [
        Sublayer(homes[group[0].index], tuple(site.index for site in group), counts_of(group[0]))
        for group in alike.values()
    ]


def called(model: PreTrainedModel, inputs: dict[str, Any], paths: set[str]) -> Trace:
    """The first call of each of these modules in a forward pass."""
    with torch.no_grad(), evaluating(model), tracing(model, sorted(paths), []) as trace:
        model(**inputs)
    return trace


def counts_of(site: Site) -> tuple[int, ...]:
    """The numbers of units that a site is timed with."""
    units, fewest = site.size // site.group, fewest_of(site)
    if units <= ALL_COUNTS:
        return tuple(range(fewest, units + 1))
    steps = (units * step / STEPS for step in range(1, STEPS))
    return tuple(sorted({fewest, max(units // 64, 1), *(usual(step) for step in steps), usual(units - 1), units}))


def usual(count: float) -> int:
    """A number near this one, of the sort that pruning leaves. Widths that are multiples of 8 are faster than others,
    and would promise too much."""
    near = round(count)
    return near if near <= ALL_COUNTS else near - near % 8 - 3


def fewest_of(site: Site) -> int:
    """Units that must stay."""
    if site.obstacle:
        return site.size // site.group
    return 1 if site.obstacle_to_emptying else 0


def timed(model: PreTrainedModel, sites: Sequence[Site], home: str, call: Call, site: int, count: int) -> Timed:
    """The home of a site with so many of its units; what else is in it has as few as it may, not to blur the times."""
    others = [
        other for other in sites if other.index != site and f"{other.path}.".startswith(f"{home}." if home else "")
    ]
    left = {site: count, **{other.index: fewest_of(other) for other in others if other.kept}}
    return Timed(with_units(model, sites, left).get_submodule(home), call.args, call.kwargs, copied)


def with_units(model: PreTrainedModel, sites: Sequence[Site], left: dict[int, int]) -> PreTrainedModel:
    """A copy with so many units left at these sites, the first ones. What is not cut shares its memory."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, dict(shared)).eval()
    remove_units(twin, [member for index, count in left.items() for member in _beyond(sites[index], count)])
    return twin


def _beyond(site: Site, count: int) -> list[Member]:
    return [member for unit in site.units()[count:] for member in unit]


def _around(site: Site) -> list[str]:
    """Modules around all parts of a site, the smallest first, the model itself last."""
    words = [path.split(".") for path in (site.path, site.o, *site.maps)]
    shared = 0
    while all(len(path) > shared and path[shared] == words[0][shared] for path in words):
        shared += 1
    return [".".join(words[0][:length]) for length in range(shared, -1, -1)]


def _likeness(model: nn.Module, site: Site, home: str, call: Call) -> Any:
    module = model.get_submodule(home)
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())
    what = (site.kind, site.place, site.size, site.group, site.applications, fewest_of(site))
    return type(module), type(model.get_submodule(site.path)), what, shapes, _shapes((call.args, call.kwargs))


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(_shapes(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _shapes(item)) for name, item in sorted(value.items()))
    return None
