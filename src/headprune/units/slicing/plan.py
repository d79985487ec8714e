"""What a model's forward code needs beyond sliced weights, as plain data that a checkpoint can carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from headprune.units.spec import Site

# Attributes of attention modules that their forward code reads, by what they count. Weights decide how many heads
# there are; these are set to match, whatever a family calls them.
QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_query_heads")
KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
WIDTHS = ("all_head_size", "split_size", "inner_dim")


def plan(model: nn.Module, sites: Sequence[Site], kept: Mapping[int, Sequence[int]]) -> list[dict[str, Any]]:
    """The steps for `quirks.restructure` after which each of these sites has exactly the given members left."""
    shapes: dict[str, list[int]] = {}  # a map between two feed-forward layers loses rows for one, columns for the other
    for index, ids in kept.items():
        _reduce_shapes(shapes, model, sites[index], len(ids))
    return [_entry(model, sites[index], list(ids), shapes) for index, ids in sorted(kept.items())]


def _entry(model: nn.Module, site: Site, kept: list[int], shapes: Mapping[str, list[int]]) -> dict[str, Any]:
    tensors = dict.fromkeys(axis.tensor for axis, _ in site.axes_left(range(len(kept) // site.group)))
    entry: dict[str, Any] = {"path": site.path, "o": site.o, "tensors": {name: shapes[name] for name in tensors}}
    if site.needs.quirk is None:
        return {"kind": site.kind, **entry, "nothing": [] if kept else list(site.maps)}
    needs = site.needs
    shown = kept or list(range(site.group))  # a site without heads keeps the shape of one unit, with outputs of zero
    silent = not kept and needs.empty == "silent"
    entry |= {
        "quirk": needs.quirk,
        "cross": site.attention == "cross",
        "group": site.group,
        "kept": kept,
        "original": site.original,
        "attributes": {name: dense * len(shown) // site.original for name, dense in needs.attributes},
        "config": {name: dense * len(shown) // site.original for name, dense in needs.config},
        "select": [list(argument) for argument in needs.inputs],
        "shown": shown,
        "form": None if needs.form is None else list(needs.form),
        "silent": silent,
        "delete": [] if kept or silent else [*site.maps, *needs.delete],
    }
    if silent:
        entry["zeros"] = {path: _rows(model, site, path) for path in site.maps}
    return entry


def _reduce_shapes(shapes: dict[str, list[int]], model: nn.Module, site: Site, members: int) -> None:
    """Reduce the shape of every tensor that exists with this number of members."""
    for axis, remaining in site.axes_left(range(members // site.group)):
        owner, _, name = axis.tensor.rpartition(".")
        shape = shapes.setdefault(axis.tensor, list(getattr(model.get_submodule(owner), name).shape))
        shape[axis.dim] = axis.length_with(len(remaining))


def _rows(model: nn.Module, site: Site, path: str) -> int:
    """The outputs of a map when one unit is left."""
    axis = next((axis for axis in reversed(site.axes) if axis.module == path), None)
    if axis is not None:
        return axis.length_with(1)
    module: Any = model.get_submodule(path)  # of a site without units already: its placeholder
    return int(module.out_features)
