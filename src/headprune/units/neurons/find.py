"""The feed-forward sites of a model: every module that holds the maps of a known kind of feed-forward layer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from headprune.errors import UnsupportedModelError
from headprune.hooks.paths import absolute, submodule
from headprune.units.families import FeedForward
from headprune.units.linear import in_features, is_plain, is_transposed, out_features
from headprune.units.neurons.spec import LAST_NEURON, NeuronSite, Strip
from headprune.units.placeholders import is_bias


def feed_forward_sites(
    model: nn.Module,
    layouts: Sequence[FeedForward],
    removed: Mapping[int, Sequence[int]],
    *,
    first: int = 0,
    towers: Sequence[str] = (),
    stacks: Any = None,
    times: int = 1,
    measured: bool = False,
) -> list[NeuronSite]:
    """Sites numbered from `first`, some of whose neurons may be `removed` (by ordinal); `stacks` says for a path which
    part of the model it belongs to, `times` how often a tied layer runs where the modules do not tell."""
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    found = [
        (path, layout)
        for path, module in model.named_modules()
        for layout in layouts
        if (not layout.within or layout.within == pattern(path)) and _holds(module, layout)
    ]
    found.sort(key=lambda place: [word not in place[0] for word in towers])
    sites = []
    for ordinal, (path, layout) in enumerate(found):
        applications = max(uses[id(model.get_submodule(path))], times)
        stack = "encoder" if stacks is None else stacks(path)
        site = _read(model, path, layout, ordinal, list(removed.get(ordinal, ())), measured=measured)
        sites.append(_placed(site, first + ordinal, applications, stack))
    return sites


def pattern(path: str) -> str:
    """A path with the numbers of layers and experts written as *."""
    return re.sub(r"(^|(?<=[._]))\d+(?=\.|$)", "*", path)


def _holds(module: nn.Module, layout: FeedForward) -> bool:
    return all(submodule(module, name) is not None for name in (*layout.maps, layout.down))


def _placed(site: dict[str, Any], index: int, applications: int, stack: str) -> NeuronSite:
    return NeuronSite(**site, index=index, applications=applications, stack=stack)


def _read(
    model: nn.Module, path: str, layout: FeedForward, ordinal: int, removed: list[int], *, measured: bool
) -> dict[str, Any]:
    maps = tuple(absolute(path, name) for name in layout.maps)
    down = absolute(path, layout.down)
    output: Any = model.get_submodule(down)
    empty = is_bias(output)
    size = 0 if empty else in_features(_linear(model, path, down))
    original = size + len(removed)
    if any(not 0 <= neuron < original for neuron in removed):
        raise UnsupportedModelError(
            f"config.pruned_neurons lists neuron {max(removed)} for feed-forward site {ordinal} ({path}), which had "
            f"{original} neurons; the record and the weights do not belong together."
        )
    gone = set(removed)
    others = tuple(Strip(absolute(path, name), dim) for name, dim in layout.others)
    return {
        "ordinal": ordinal,
        "path": path,
        "o": down,
        "width": 1,
        "group": 1,
        "kept": () if empty else tuple(neuron for neuron in range(original) if neuron not in gone),
        "original": original,
        "strips": others if empty else (*others, *_strips(model, path, layout, maps, down, size)),
        "maps": maps,
        "measured": measured,
        "last_stays": "" if layout.may_empty else LAST_NEURON,
    }


def _strips(
    model: nn.Module, path: str, layout: FeedForward, maps: Sequence[str], down: str, size: int
) -> tuple[Strip, ...]:
    strips = []
    for name in maps:
        module = _linear(model, path, name)
        if out_features(module) != layout.blocks * size:
            raise UnsupportedModelError(
                f"Stopped at {path}: {name} has {out_features(module)} rows, which are not {layout.blocks} for each of "
                f"the {size} columns of {down}."
            )
        for block in range(layout.blocks):
            place = (block, layout.blocks, layout.interleaved)
            strips.append(Strip(f"{name}.weight", int(is_transposed(module)), *place))
            if module.bias is not None:
                strips.append(Strip(f"{name}.bias", 0, *place))
    output = model.get_submodule(down)
    return (*strips, Strip(f"{down}.weight", int(not is_transposed(output))))


def _linear(model: nn.Module, path: str, name: str) -> Any:
    module = model.get_submodule(name)
    if is_plain(module):
        return module
    kind = type(module).__name__
    raise UnsupportedModelError(
        f"Stopped at {path}: its projection {name} is a {kind}, not a Linear or Conv1D; merge the adapter or "
        "dequantise the model first."
    )
