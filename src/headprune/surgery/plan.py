"""What a model's forward code needs beyond sliced weights, as plain data that a checkpoint can carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from headprune.surgery.check import check_removable
from headprune.units import AttentionSite, Head, resolve
from headprune.units.linear import in_features, out_features
from headprune.units.quirks import is_empty, restructure

# Attributes of attention modules that their forward code reads, and what they count. Weights decide how many heads
# there are; these only have to follow, whatever a family calls them.
QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_query_heads")
KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
WIDTHS = ("all_head_size", "split_size", "inner_dim")


def plan(model: PreTrainedModel, sites: Sequence[AttentionSite], kept: Mapping[int, Sequence[int]]) -> list[dict]:
    """What `quirks.restructure` has to do so that each named site has exactly the given heads left."""
    return [_plan_site(model, sites[index], list(ids)) for index, ids in sorted(kept.items())]


def _plan_site(model: PreTrainedModel, site: AttentionSite, kept: list[int]) -> dict[str, Any]:
    module = model.get_submodule(site.path)
    queries, keys = len(kept), len(kept) // site.group
    numbers = {
        **dict.fromkeys(QUERY_COUNTS, queries),
        **dict.fromkeys(KV_COUNTS, keys),
        **dict.fromkeys(WIDTHS, queries * site.head_dim),
    }
    read_by_forward = set(type(module).forward.__code__.co_names)
    base = getattr(type(module), "_base_class", None)
    if base is not None:
        read_by_forward |= set(base.forward.__code__.co_names)
    config = getattr(module, "config", None)
    entry: dict[str, Any] = {
        "path": site.path,
        "quirk": site.quirk,
        "cross": site.attention == "cross",
        "group": site.group,
        "kept": kept,
        "original": site.original_heads,
        "o": site.o,
        "attributes": {name: n for name, n in numbers.items() if name in module.__dict__},
        # Phi-3 reads its head count from the config at every call.
        "config": {
            name: n
            for name, n in numbers.items()
            if name in read_by_forward and name not in module.__dict__ and hasattr(config, name)
        },
        "linears": {},
        "delete": [],
    }
    if not kept:
        # A site that is empty already remembers what it lost: a portable checkpoint starts from the dense class again.
        lost = list(dict.fromkeys(projection.module for projection in site.projections))
        entry["delete"] = module.headprune_empty["gone"] if is_empty(module) else lost
        return entry
    rows: dict[str, int] = {}
    for projection in site.projections:
        count = queries if projection.role == "q" else keys
        rows[projection.module] = rows.get(projection.module, 0) + count * projection.width
    for path, outputs in rows.items():
        entry["linears"][path] = [in_features(model.get_submodule(path)), outputs]
    entry["linears"][site.o] = [queries * site.head_dim, out_features(model.get_submodule(site.o))]
    return entry


def shrink(model: PreTrainedModel, removed: Mapping[int, Sequence[int]]) -> None:
    """Give a freshly built dense model the shapes of a pruned one, for a loader to fill with weights."""
    sites = resolve(model)
    check_removable(sites, [Head(site, head) for site, ids in removed.items() for head in ids])
    kept = {index: [h for h in sites[index].kept if h not in set(ids)] for index, ids in removed.items() if ids}
    restructure(model, plan(model, sites, kept))
    write_record(model, removed)


def write_record(model: PreTrainedModel, removed: Mapping[int, Sequence[int]]) -> None:
    model.config.pruned_heads = {str(site): sorted(removed[site]) for site in sorted(removed)}
