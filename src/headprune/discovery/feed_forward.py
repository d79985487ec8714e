"""Where the neurons of a model are, by experiment: a feed-forward layer is a linear map each of whose input columns is
moved by rows of its own in the maps before it, and by no others.

The model runs once with the output of every linear map cut off from what came before, so that a backward pass from the
input of one map reaches exactly the maps that feed it. One such pass per column tells which rows move it.
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
from headprune.discovery.proof import fails
from headprune.discovery.twin import Run, small_config
from headprune.hooks.attach import hooks
from headprune.hooks.paths import pattern
from headprune.units.cutting.record import dense_layout, keep_dense_layout
from headprune.units.dense import dense_class, dense_config, quiet, structure_of
from headprune.units.families import FeedForward
from headprune.units.feed_forward import feed_forward_sites
from headprune.units.linear import in_features, is_plain
from headprune.units.members import Member
from headprune.units.resolve import survey
from headprune.units.spec import Site

FEWEST = 4  # columns of a map that may have neurons


def discover_feed_forward(model: nn.Module, attention: Sequence[Site]) -> tuple[FeedForward, ...]:
    """The kinds of feed-forward layers of a model with this attention: by an experiment on its class, or, where it is
    no transformers model, on itself."""
    if isinstance(model, PreTrainedModel):
        return layouts_for(dense_class(model), model.config)
    return _of_plain_module(model, attention)


def layouts_for(kind: Any, config: Any) -> tuple[FeedForward, ...]:
    """Layouts found on a small twin of this class, once; none where there is no twin."""

    def make() -> tuple[FeedForward, ...]:
        with torch.device("cpu"), quiet():
            return _on_twin(kind, dense_config(config))

    found: tuple[FeedForward, ...] = remembered(
        kind,
        "neurons " + structure_of(config),
        make,
        to_json=lambda layouts: [asdict(layout) for layout in layouts],
        from_json=lambda layouts: tuple(_from_plain(layout) for layout in layouts),
    )
    return found


def _on_twin(kind: Any, config: Any) -> tuple[FeedForward, ...]:
    for depth in (4, None):
        try:
            twin, runs = twin_of(kind, small_config(config, keep_heads=False, depth=depth))
        except Exception:  # whatever a config class says to sizes that it did not expect
            continue
        return tuple(measured_layouts(twin, runs, maps_of(survey(twin).sites)))
    return ()


def _of_plain_module(model: nn.Module, attention: Sequence[Site]) -> tuple[FeedForward, ...]:
    """A module that is no transformers model is measured as it is, before anything goes."""
    known: tuple[FeedForward, ...] | None = dense_layout(model, "feed-forward")
    if known is None:
        try:
            twin, runs = twin_of_module(model)
            known = tuple(measured_layouts(twin, runs, maps_of(attention)))
        except DiscoveryError:
            known = ()
        keep_dense_layout(model, "feed-forward", known)
    return known


def maps_of(attention: Iterable[Site]) -> set[str]:
    """Linear maps that belong to attention."""
    return {path for site in attention for path in (site.o, *site.maps)}


def _from_plain(plain: Any) -> FeedForward:
    others = tuple((name, dim) for name, dim in plain["others"])
    return FeedForward(**{**plain, "maps": tuple(plain["maps"]), "others": others})


def measured_layouts(twin: nn.Module, runs: Sequence[Run], taken: Collection[str]) -> list[FeedForward]:
    """The kinds of feed-forward layers of a small random model that neurons can be removed from exactly; maps that are
    `taken` by attention are none."""
    found: dict[str, FeedForward] = {}
    for run in runs:
        with _apart(twin) as seen:
            twin.get_submodule(run.path)(**run.inputs)
            for down, (columns, fed) in seen.takers.items():
                key = pattern(down)
                if down in taken or "*" not in key or key in found or columns.shape[-1] < FEWEST:
                    continue
                layout = _layout(twin, down, columns, {path: out for path, out in fed.items() if path != down})
                if layout is not None:
                    found[key] = layout
    return [checked for layout in found.values() if (checked := _proven(twin, runs, layout)) is not None]


class _Seen:
    def __init__(self) -> None:
        self.outputs: dict[str, torch.Tensor] = {}
        self.takers: dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {}


@contextmanager
def _apart(model: nn.Module) -> Iterator[_Seen]:
    """While it runs, what linear maps give starts a graph of its own, and what they are given is kept."""
    seen = _Seen()
    states = [(tensor, tensor.requires_grad) for tensor in model.parameters()]

    def taking(path: str) -> Any:
        def take(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point() and args[0].requires_grad:
                seen.takers.setdefault(path, (args[0], dict(seen.outputs)))

        return take

    def giving(path: str) -> Any:
        def give(module: nn.Module, args: Any, output: Any) -> Any:
            if not isinstance(output, torch.Tensor):  # a router derived from Linear
                return output
            seen.outputs[path] = output.detach().requires_grad_(True)
            return seen.outputs[path].clone()  # which code may write into

        return give

    maps = [(path, module) for path, module in model.named_modules() if is_plain(module)]
    with (
        torch.enable_grad(),
        hooks([(module, taking(path)) for path, module in maps], before=True),
        hooks([(module, giving(path)) for path, module in maps]),
    ):
        for tensor, _ in states:
            tensor.requires_grad_(tensor.is_floating_point())
        try:
            yield seen
        finally:
            for tensor, state in states:
                tensor.requires_grad_(state)


def _layout(twin: nn.Module, down: str, columns: torch.Tensor, fed: dict[str, torch.Tensor]) -> FeedForward | None:
    """The layer whose output map this is, if each column has rows of its own everywhere."""
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
    tensors = [*fed.values(), *between.values()]
    flat = columns.reshape(-1, size)
    weights = torch.rand(len(flat), generator=torch.Generator().manual_seed(0)).to(flat) + 0.5
    reached = torch.autograd.grad((flat * weights[:, None]).sum(), tensors, retain_graph=True, allow_unused=True)
    names = [*fed, *between]
    live = [place for place, gradient in enumerate(reached) if gradient is not None and bool(gradient.any())]
    maps = [names[place] for place in live if names[place] in fed]
    if not maps or any(fed[name].shape[-1] % size for name in maps):
        return None
    tables = {names[place]: [torch.zeros(size, length) for length in tensors[place].shape] for place in live}
    moving = [tensors[place] for place in live]
    for column in range(size):
        target = (flat[:, column] * weights).sum()
        gradients = torch.autograd.grad(target, moving, retain_graph=True, allow_unused=True)
        for place, gradient in zip(live, gradients, strict=True):
            if gradient is not None:
                sizes = gradient.abs()
                for axis, table in enumerate(tables[names[place]]):
                    table[column] = sizes.movedim(axis, 0).reshape(table.shape[1], -1).amax(1)
    noise = NOISE.get(columns.dtype, 1e-6)
    moved = {name: [t > noise * max(float(t.max()), 1e-30) for t in parts] for name, parts in tables.items()}
    kinds = {_kind(moved[name][-1], size) for name in maps}
    if len(kinds) != 1 or None in kinds:
        return None
    blocks, interleaved = next(kind for kind in kinds if kind is not None)
    others = [(name, dim) for name in moved if name not in fed for dim in _diagonal(moved[name], size)]
    return _relative(twin, down, maps, blocks, interleaved, others)


def _kind(table: torch.Tensor, size: int) -> tuple[int, bool] | None:
    """(blocks, interleaved) of rows [columns x rows] that move one column each; None where a row moves several."""
    columns, rows = table.nonzero(as_tuple=True)
    blocks = table.shape[1] // size
    if len(rows) * 2 < table.shape[1]:  # too few moved anything for a rule to be seen
        return None
    if bool((rows % size == columns).all()):
        return blocks, False
    return (blocks, True) if bool((rows // blocks == columns).all()) else None


def _diagonal(parts: Sequence[torch.Tensor], size: int) -> list[int]:
    """The axes of a tensor that have an entry of every neuron."""
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
    others: Sequence[tuple[str, int]],
) -> FeedForward | None:
    paths = [path.split(".") for path in (down, *maps, *(name for name, _ in others))]
    shared = 0
    while all(len(path) > shared + 1 and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    home = ".".join(paths[0][:shared])
    if "*" not in pattern(home):
        return None
    cut = len(home) + 1
    return FeedForward(
        tuple(path[cut:] for path in maps),
        down[cut:],
        blocks,
        interleaved,
        tuple((name[cut:], dim) for name, dim in others),
        within=pattern(home),
    )


def _proven(twin: nn.Module, runs: Sequence[Run], layout: FeedForward) -> FeedForward | None:
    """The layout if neurons can be removed exactly, noted whether all of a layer may go."""
    sites = feed_forward_sites(twin, [layout], {})
    if not sites or fails(twin, runs, sites, some_neurons(sites)):
        return None
    everything = [Member(0, neuron) for neuron in sites[0].kept]
    return replace(layout, may_empty=not fails(twin, runs, sites, everything))


def some_neurons(sites: Sequence[Site]) -> list[Member]:
    """Half of the neurons of every site, other ones at every other site."""
    return [Member(site.index, neuron) for site in sites for neuron in site.kept[site.index % 2 :: 2]]
