"""What a model's forward code needs beyond sliced weights, as plain data that a checkpoint can carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from headprune.units.linear import in_features, out_features
from headprune.units.neurons.spec import NeuronSite
from headprune.units.quirks import is_empty
from headprune.units.spec import AttentionSite, Site

# Attributes of attention modules that their forward code reads, and what they count. Weights decide how many heads
# there are; these only have to follow, whatever a family calls them.
QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_query_heads")
KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
WIDTHS = ("all_head_size", "split_size", "inner_dim")


def plan(model: nn.Module, sites: Sequence[Site], kept: Mapping[int, Sequence[int]]) -> list[dict[str, Any]]:
    """What `quirks.restructure` has to do so that each named site has exactly the given members left."""
    entries = []
    for index, ids in sorted(kept.items()):
        site = sites[index]
        if isinstance(site, NeuronSite):
            entries.append(_feed_forward(model, site, len(ids)))
        elif isinstance(site, AttentionSite):
            make = _by_table if site.recipe is None else _by_recipe
            entries.append(make(model, site, list(ids)))
    return entries


def _feed_forward(model: nn.Module, site: NeuronSite, left: int) -> dict[str, Any]:
    """What a layer with so many neurons left needs: its tensors in other shapes, or, without any, none of its maps."""
    tensors: dict[str, list[int]] = {}
    going = () if left else (*site.maps, site.o)
    for strip in site.strips:
        path, _, name = strip.tensor.rpartition(".")
        if path not in going:
            shape = tensors.setdefault(strip.tensor, list(getattr(model.get_submodule(path), name).shape))
            shape[strip.dim] = strip.blocks * left
    nothing = [] if left else list(site.maps)
    return {"kind": site.kind, "path": site.path, "o": site.o, "tensors": tensors, "nothing": nothing}


def _common(site: AttentionSite, kept: list[int]) -> dict[str, Any]:
    return {
        "path": site.path,
        "quirk": site.quirk,
        "cross": site.attention == "cross",
        "group": site.group,
        "kept": kept,
        "original": site.original_heads,
        "o": site.o,
        "delete": [],
        "linears": {},
    }


def _by_table(model: nn.Module, site: AttentionSite, kept: list[int]) -> dict[str, Any]:
    module: Any = model.get_submodule(site.path)
    queries, keys = len(kept), len(kept) // site.group
    numbers = {
        **dict.fromkeys(QUERY_COUNTS, queries),
        **dict.fromkeys(KV_COUNTS, keys),
        **dict.fromkeys(WIDTHS, queries * site.head_dim),
    }
    config = getattr(module, "config", None)
    entry = _common(site, kept)
    entry["attributes"] = {name: n for name, n in numbers.items() if name in module.__dict__}
    # Phi-3 reads its head count from the config at every call.
    entry["config"] = {name: n for name, n in numbers.items() if name not in module.__dict__ and hasattr(config, name)}
    if not kept:
        # A site that is empty already remembers what it lost: a portable checkpoint starts from the dense class again.
        lost = [*dict.fromkeys(projection.module for projection in site.projections), *site.tensors]
        entry["delete"] = module.headprune_empty["gone"] if is_empty(module) else lost
        return entry
    rows: dict[str, int] = {}
    for projection in site.projections:
        count = queries if projection.role == "q" else keys
        rows[projection.module] = rows.get(projection.module, 0) + count * projection.width
    for path, outputs in rows.items():
        entry["linears"][path] = [in_features(model.get_submodule(path)), outputs]
    entry["linears"][site.o] = [queries * site.head_dim, out_features(model.get_submodule(site.o))]
    if site.tensors:
        entry["tensors"] = {path: [queries, *model.get_parameter(path).shape[1:]] for path in site.tensors}
    return entry


def _by_recipe(model: nn.Module, site: AttentionSite, kept: list[int]) -> dict[str, Any]:
    """A site that was measured: every axis its units own, and the numbers that were found to be read."""
    recipe = site.recipe
    assert recipe is not None
    shown = kept or list(range(site.group))  # a site without heads keeps the form of one unit, which gives nothing
    units = len(shown) // site.group
    entry = _common(site, kept)
    entry["attributes"] = {name: dense * len(shown) // site.original for name, dense in recipe.attributes}
    entry["config"] = {name: dense * len(shown) // site.original for name, dense in recipe.config}
    entry["select"] = [list(given) for given in recipe.inputs]
    entry["shown"] = shown
    entry["form"] = list(recipe.form) if recipe.form is not None else None
    entry["silent"] = not kept and recipe.empty == "silent"
    gone = set() if kept else {*site.maps, site.o}  # maps of a site without heads leave as a whole
    entry["tensors"], rows = _shapes(model, site, units, gone)
    if entry["silent"]:
        entry["zeros"] = {path: rows[path] for path in site.maps}
    elif not kept:
        entry["delete"] = list(site.maps)
    return entry


def _shapes(
    model: nn.Module, site: AttentionSite, units: int, gone: set[str]
) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The shape of every tensor with so many units in it, and the output rows of every map."""
    shapes: dict[str, list[int]] = {}
    rows: dict[str, int] = {}
    for axis in site.dense_axes:
        path, _, name = axis.tensor.rpartition(".")
        length = axis.length - sum(len(unit) for unit in axis.units[units:])
        if path in site.maps:
            rows[path] = length
        if path not in gone:
            shape = shapes.setdefault(axis.tensor, list(getattr(model.get_submodule(path), name).shape))
            shape[axis.dim] = length
    return shapes, rows
