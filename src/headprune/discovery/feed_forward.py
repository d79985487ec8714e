"""Discovers the neurons of a model by experiment: in a feed-forward layer, each input column of the output map depends
on separate rows of the maps before it, and on no others.

The model runs once with the output of every linear map detached from the graph before it, so that a backward pass from
the input of one map reaches exactly the maps that feed it. One such pass per column shows on which rows it depends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.cache import remembered
from headprune.discovery.attention import DiscoveryError, twin_of
from headprune.discovery.influence import NOISE
from headprune.discovery.plain_modules import twin_of_module
from headprune.discovery.proof import removal_failure
from headprune.discovery.twin import Run, small_config
from headprune.hooks.attach import hooks
from headprune.hooks.module_paths import pattern
from headprune.units.dense_model import classes_of, dense_class, dense_config, quiet, structure_of
from headprune.units.families import FeedForward
from headprune.units.feed_forward import feed_forward_sites
from headprune.units.linear import in_features, is_plain
from headprune.units.members import Member
from headprune.units.resolve import survey
from headprune.units.slicing.record import dense_layout, keep_dense_layout
from headprune.units.spec import Site

MIN_COLUMNS = 4  # of the output map of a feed-forward layer


def discover_feed_forward(model: nn.Module, attention: Sequence[Site]) -> tuple[FeedForward, ...]:
    """The layouts of the feed-forward layers of a model with these attention sites: by an experiment on its class, or,
    where it is no transformers model, on a copy of the module."""
    if isinstance(model, PreTrainedModel):
        return layouts_for(dense_class(model), model.config)
    return _of_plain_module(model, attention)


def layouts_for(kind: Any, config: Any) -> tuple[FeedForward, ...]:
    """Layouts measured on a small twin of this class and cached; none where no twin can be built."""

    def make() -> tuple[FeedForward, ...]:
        with torch.device("cpu"), quiet():
            return _on_twin(kind, dense_config(config))

    result: tuple[FeedForward, ...] = remembered(
        kind,
        "neurons " + structure_of(config),
        make,
        classes=classes_of(kind, config),
        to_json=lambda layouts: [asdict(layout) for layout in layouts],
        from_json=lambda layouts: tuple(_from_plain(layout) for layout in layouts),
    )
    return result


def _on_twin(kind: Any, config: Any) -> tuple[FeedForward, ...]:
    for depth in (4, None):
        try:
            twin, runs = twin_of(kind, small_config(config, keep_heads=False, depth=depth))
        except Exception:  # a config class may reject the small sizes with any error
            continue
        return tuple(measured_layouts(twin, runs, maps_of(survey(twin).sites)))
    return ()


def _of_plain_module(model: nn.Module, attention: Sequence[Site]) -> tuple[FeedForward, ...]:
    """Measure a copy of a module that is no transformers model, before anything is removed from it."""
    layouts: tuple[FeedForward, ...] | None = dense_layout(model, "feed-forward")
    if layouts is None:
        try:
            twin, runs = twin_of_module(model)
            layouts = tuple(measured_layouts(twin, runs, maps_of(attention)))
        except DiscoveryError:
            layouts = ()
        keep_dense_layout(model, "feed-forward", layouts)
    return layouts


def maps_of(attention: Iterable[Site]) -> set[str]:
    """The paths of linear maps that belong to attention."""
    return {path for site in attention for path in (site.o, *site.maps)}


def _from_plain(plain: Any) -> FeedForward:
    neuron_axes = tuple((name, dim) for name, dim in plain["others"])
    return FeedForward(**{**plain, "maps": tuple(plain["maps"]), "others": neuron_axes})


def measured_layouts(twin: nn.Module, runs: Sequence[Run], attention_maps: Collection[str]) -> list[FeedForward]:
    """The layouts of the feed-forward layers of a small random model from which neurons can be removed exactly; maps in
    `attention_maps` are skipped."""
    layouts: dict[str, FeedForward] = {}
    for run in runs:
        with _separate_graphs(twin) as recording:
            twin.get_submodule(run.path)(**run.inputs)
            for down, (columns, outputs) in recording.consumers.items():
                key = pattern(down)
                if down in attention_maps or "*" not in key or key in layouts or columns.shape[-1] < MIN_COLUMNS:
                    continue
                layout = _layout(twin, down, columns, {path: out for path, out in outputs.items() if path != down})
                if layout is not None:
                    layouts[key] = layout
    return [checked for layout in layouts.values() if (checked := _proven(twin, runs, layout)) is not None]


class _Recording:
    def __init__(self) -> None:
        self.outputs: dict[str, torch.Tensor] = {}
        self.consumers: dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}


@contextmanager
def _separate_graphs(model: nn.Module) -> Iterator[_Recording]:
    """Inside the block, the output of every linear map is detached and starts a new graph; its input is recorded."""
    recording = _Recording()
    states = [(tensor, tensor.requires_grad) for tensor in model.parameters()]

    def input_hook(path: str) -> Any:
        def record_input(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point() and args[0].requires_grad:
                recording.consumers.setdefault(path, (args[0], dict(recording.outputs)))

        return record_input

    def output_hook(path: str) -> Any:
        def detach_output(module: nn.Module, args: Any, output: Any) -> Any:
            if not isinstance(output, torch.Tensor):  # a router derived from Linear
                return output
            recording.outputs[path] = output.detach().requires_grad_(True)
            return recording.outputs[path].clone()  # a clone, because modeling code may write into it

        return detach_output

    maps = [(path, module) for path, module in model.named_modules() if is_plain(module)]
    with (
        torch.enable_grad(),
        hooks([(module, input_hook(path)) for path, module in maps], before=True),
        hooks([(module, output_hook(path)) for path, module in maps]),
    ):
        for tensor, _ in states:
            tensor.requires_grad_(tensor.is_floating_point())
        try:
            yield recording
        finally:
            for tensor, state in states:
                tensor.requires_grad_(state)


def _layout(twin: nn.Module, down: str, columns: torch.Tensor, outputs: dict[str, torch.Tensor]) -> FeedForward | None:
    """The layout of the layer with this output map; None unless each column depends on separate rows in every map."""
    size = columns.shape[-1]
    if size != in_features(twin.get_submodule(down)):
        return None
    between = {
        f"{path}.{name}" if path else name: tensor
        for path, module in twin.named_modules()
        if not is_plain(module)
        for name, tensor in module.named_parameters(recurse=False)
        if tensor.requires_grad
    }
    tensors = [*outputs.values(), *between.values()]
    flat = columns.reshape(-1, size)
    weights = torch.rand(len(flat), generator=torch.Generator().manual_seed(0)).to(flat) + 0.5
    reached = torch.autograd.grad((flat * weights[:, None]).sum(), tensors, retain_graph=True, allow_unused=True)
    names = [*outputs, *between]
    live = [index for index, gradient in enumerate(reached) if gradient is not None and bool(gradient.any())]
    maps = [names[index] for index in live if names[index] in outputs]
    if not maps or any(outputs[name].shape[-1] % size for name in maps):
        return None
    tables = {names[index]: [torch.zeros(size, length) for length in tensors[index].shape] for index in live}
    targets = [tensors[index] for index in live]
    for column in range(size):
        target = (flat[:, column] * weights).sum()
        gradients = torch.autograd.grad(target, targets, retain_graph=True, allow_unused=True)
        for index, gradient in zip(live, gradients, strict=True):
            if gradient is not None:
                sizes = gradient.abs()
                for axis, table in enumerate(tables[names[index]]):
                    table[column] = sizes.movedim(axis, 0).reshape(table.shape[1], -1).amax(1)
    noise = NOISE.get(columns.dtype, 1e-6)
    moved = {name: [t > noise * max(float(t.max()), 1e-30) for t in parts] for name, parts in tables.items()}
    kinds = {_kind(moved[name][-1], size) for name in maps}
    if len(kinds) != 1 or None in kinds:
        return None
    blocks, interleaved = next(kind for kind in kinds if kind is not None)
    neuron_axes = [(name, dim) for name in moved if name not in outputs for dim in _diagonal(moved[name], size)]
    return _relative(twin, down, maps, blocks, interleaved, neuron_axes)


def _kind(table: torch.Tensor, size: int) -> tuple[int, bool] | None:
    """(blocks, interleaved) of a table [columns x rows] in which each row moves one column; None where a row moves
    several."""
    columns, rows = table.nonzero(as_tuple=True)
    blocks = table.shape[1] // size
    if len(rows) * 2 < table.shape[1]:  # too few rows have an effect to recognise a rule
        return None
    if bool((rows % size == columns).all()):
        return blocks, False
    return (blocks, True) if bool((rows // blocks == columns).all()) else None


def _diagonal(parts: Sequence[torch.Tensor], size: int) -> list[int]:
    """The axes of a tensor with one entry for every neuron."""
    return [
        dim
        for dim, table in enumerate(parts)
        if table.shape[1] == size and bool(table.any()) and not bool((table & ~torch.eye(size, dtype=torch.bool)).any())
    ]


def _relative(
    twin: nn.Module,
    down: str,
    maps: Sequence[str],
    blocks: int,
    interleaved: bool,
    neuron_axes: Sequence[tuple[str, int]],
) -> FeedForward | None:
    paths = [path.split(".") for path in (down, *maps, *(name for name, _ in neuron_axes))]
    shared = 0
    while all(len(path) > shared + 1 and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    parent = ".".join(paths[0][:shared])
    if "*" not in pattern(parent):
        return None
    start = len(parent) + 1
    return FeedForward(
        tuple(path[start:] for path in maps),
        down[start:],
        blocks,
        interleaved,
        tuple((name[start:], dim) for name, dim in neuron_axes),
        within=pattern(parent),
    )


def _proven(twin: nn.Module, runs: Sequence[Run], layout: FeedForward) -> FeedForward | None:
    """The layout, with `may_empty` set, if its neurons can be removed exactly; None otherwise."""
    sites = feed_forward_sites(twin, [layout], {})
    if not sites or removal_failure(twin, runs, sites, some_neurons(sites)):
        return None
    everything = [Member(0, neuron) for neuron in sites[0].kept]
    return replace(layout, may_empty=not removal_failure(twin, runs, sites, everything))


def some_neurons(sites: Sequence[Site]) -> list[Member]:
    """Half of the neurons of every site: the even ones at sites with an even index, the odd ones at the others."""
    return [Member(site.index, neuron) for site in sites for neuron in site.kept[site.index % 2 :: 2]]
