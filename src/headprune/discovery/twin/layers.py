"""Fewer layers, at least one of every kind."""

from __future__ import annotations

from typing import Any

from .config_patterns import INDICES, LAYERS, PERIOD
from .config_tree import Node


def reduce_depth(tree: list[Node], depth: int) -> None:
    for node in tree:
        shorten(node, depth)


def shorten(node: Node, depth: int) -> None:
    stages = len(node.get("depths") or ())
    counts = {name: value for name, value in node.ints() if LAYERS.search(name) and 0 < value != stages}
    total = max(counts.values(), default=0)
    per_layer = {
        name: values
        for name, values in node.lists()
        if total > 2 and len(values) == total and not INDICES.search(name) and name != "depths"
    }
    outputs = getattr(node.config, "_out_indices", None) or []
    chosen = choose_layers(list(per_layer.values()), total, max(depth, len(outputs)))
    for name, value in counts.items():
        node.set(name, min(value, len(chosen) if value == total else depth))
    for name in per_layer:
        node.set(name, [node.current(name)[index] for index in chosen])
    for name, values in node.lists():
        if name in ("depths", "num_block_repeats", "stage_num_blocks", "layers_per_stage", "blocks_per_stage"):
            if all(isinstance(value, int) for value in values):
                node.set(name, [min(value, depth) for value in values])
        elif INDICES.search(name) and total and all(isinstance(value, int) and value >= 0 for value in values):
            node.set(name, indices(values, total, len(chosen)))
    for name, value in node.ints():
        if PERIOD.search(name) and value > 2:
            node.set(name, 2)
        elif name.endswith("_layer_offset"):
            node.set(name, min(value, 1))
        elif name == "insert_layer_id":
            node.set(name, min(value, len(chosen) - 1))
        elif name in ("num_kv_shared_layers", "first_k_dense_replace", "num_dense_layers", "max_window_layers"):
            node.set(name, min(value, len(chosen) // 2))

    name_stages(node, total, len(chosen))


def name_stages(node: Node, total: int, count: int) -> None:
    """Shorten the stage names of a backbone whose layers are its stages, and move its output indices into them."""
    names = node.get("stage_names")
    if not names or len(names) != total + 1 or count == total:
        return
    node.set("stage_names", names[: count + 1])
    outputs = getattr(node.config, "_out_indices", None)
    if outputs:
        indices = list(range(count + 1 - len(outputs), count + 1))
        vars(node.config)["_out_indices"] = indices
        vars(node.config)["_out_features"] = [names[index] for index in indices]


def choose_layers(lists: list[list[Any]], total: int, depth: int) -> list[int]:
    """Indices of layers: one of every kind that a per-layer list distinguishes, then the first ones."""
    chosen: set[int] = set()
    for values in lists:
        kinds = {str(value) for value in values}
        if len(kinds) > 4:
            continue
        for kind in sorted(kinds):
            members = [index for index, value in enumerate(values) if str(value) == kind]
            if not chosen.intersection(members):
                chosen.add(members[0])
    for index in range(total):
        if len(chosen) < min(depth, total):
            chosen.add(index)
    return sorted(chosen)


def indices(values: list[int], total: int, count: int) -> list[int]:
    """Layer indices scaled to fewer layers; a list of all layers stays a list of all layers."""
    if len(set(values)) >= total:
        return list(range(count))
    return sorted({min(count - 1, value * count // total) for value in values})
