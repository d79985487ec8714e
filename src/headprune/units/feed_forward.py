"""The feed-forward sites of a model: every module with the maps of a known kind of feed-forward layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from headprune.errors import UnsupportedModelError
from headprune.hooks.module_paths import absolute, pattern, submodule
from headprune.units.families import FeedForward
from headprune.units.linear import in_features, is_plain, is_transposed, out_features, refuse_computed
from headprune.units.placeholders import is_bias
from headprune.units.spec import Axis, Blocks, ForwardNeeds, Site


def feed_forward_sites(
    model: nn.Module,
    layouts: Sequence[FeedForward],
    removed: Mapping[int, Sequence[int]],
    *,
    first: int = 0,
    towers: Sequence[str] = (),
    stacks: Callable[[str], Any] = lambda path: "encoder",
    times: int = 1,
    family: str = "measured",
    outputs: Collection[str] = (),
) -> list[Site]:
    """Sites numbered from `first`; some of their neurons may be `removed` (by number among these sites). `stacks` maps
    a path to its part of the model, `times` is how often a tied layer runs where the modules do not show it. Between an
    output map of attention, one of `outputs`, and the next map there is no site: attention needs its output map."""
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    layers = [
        (path, layout)
        for path, module in model.named_modules()
        for layout in layouts
        if (not layout.within or layout.within == pattern(path)) and _matches(module, layout)
        if not any(absolute(path, name) in outputs for name in layout.maps)
    ]
    layers.sort(key=lambda layer: [word not in layer[0] for word in towers])
    sites = [
        Site(
            index=first + number,
            family=family,
            proven=family == "measured",
            stack=stacks(path),
            applications=max(uses[id(model.get_submodule(path))], times),
            **_read(model, path, layout, number, removed.get(number, ())),
        )
        for number, (path, layout) in enumerate(layers)
    ]
    # A map between two hidden layers is an output of one site and produces the neurons of the next: both need it.
    between = {site.o for site in sites} & {path for site in sites for path in site.maps}
    return [
        replace(site, needs=replace(site.needs, empty=""), feeds_units=site.o in between)
        if between & {site.o, *site.maps}
        else site
        for site in sites
    ]


def _matches(module: nn.Module, layout: FeedForward) -> bool:
    return all(submodule(module, name) is not None for name in (*layout.maps, layout.down))


def _read(model: nn.Module, path: str, layout: FeedForward, number: int, removed: Sequence[int]) -> dict[str, Any]:
    maps = tuple(absolute(path, name) for name in layout.maps)
    down = absolute(path, layout.down)
    empty = is_bias(model.get_submodule(down))
    size = 0 if empty else in_features(_linear(model, path, down))
    original = size + len(removed)
    if any(not 0 <= neuron < original for neuron in removed):
        raise UnsupportedModelError(
            f"config.pruned_neurons lists neuron {max(removed)} for feed-forward site {number} ({path}), which had "
            f"{original} neurons; the record does not match the weights."
        )
    removed_ids = set(removed)
    kept = range(size) if not removed else (neuron for neuron in range(original) if neuron not in removed_ids)
    neurons = Blocks.contiguous(size)
    axes = [Axis(absolute(path, name), dim, size, neurons) for name, dim in layout.others]
    producers: dict[str, Axis] = {}
    if not empty:
        for name in maps:
            module = _map(model, path, name, layout, size, down)
            axes += _rows(name, module, layout, size)
            producers.update(_blocks(axes[-1], layout, size))
        axes.append(Axis(f"{down}.weight", int(not is_transposed(model.get_submodule(down))), size, neurons))
    return {
        "kind": "neurons",
        "path": path,
        "o": down,
        "width": 1,
        "group": 1,
        "kept": () if empty else tuple(kept),
        "original": original,
        "axes": tuple(axes),
        "maps": maps,
        "producers": producers,
        "needs": ForwardNeeds(empty="nothing" if layout.may_empty else ""),
    }


def _map(model: nn.Module, path: str, name: str, layout: FeedForward, size: int, down: str) -> Any:
    module = _linear(model, path, name)
    if out_features(module) != layout.blocks * size:
        raise UnsupportedModelError(
            f"Stopped at {path}: {name} has {out_features(module)} rows, which are not {layout.blocks} for each of "
            f"the {size} columns of {down}."
        )
    return module


def _rows(name: str, module: Any, layout: FeedForward, size: int) -> Iterator[Axis]:
    """The rows of a map, one in each block for every neuron."""
    separate = tuple((block * size, 1, 1) for block in range(layout.blocks))
    units = Blocks(size, ((0, layout.blocks, layout.blocks),) if layout.interleaved else separate)
    if module.bias is not None:
        yield Axis(f"{name}.bias", 0, layout.blocks * size, units)
    yield Axis(f"{name}.weight", int(is_transposed(module)), layout.blocks * size, units)


def _blocks(rows: Axis, layout: FeedForward, size: int) -> Iterator[tuple[str, Axis]]:
    """Each block of a map by itself."""
    for block in range(layout.blocks):
        part = (block, layout.blocks, 1) if layout.interleaved else (block * size, 1, 1)
        yield f"{rows.module}:{block}", Axis(rows.tensor, rows.dim, rows.length, Blocks(size, (part,)))


def _linear(model: nn.Module, path: str, name: str) -> Any:
    module = model.get_submodule(name)
    if is_plain(module):
        return module
    refuse_computed(module, name)
    kind = type(module).__name__
    raise UnsupportedModelError(
        f"Stopped at {path}: its projection {name} is a {kind}, not a Linear or Conv1D; merge the adapter or "
        "dequantise the model first."
    )
