"""A config of the same architecture that builds in an instant."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PretrainedConfig

from .config_patterns import CHOSEN, EXPERTS, FRAMES, POSITIONS, WINDOWS
from .config_tree import Node, nodes
from .layers import reduce_depth
from .per_model import apply_exceptions
from .rotary import reduce_rotary
from .tokens import reduce_vocabulary
from .widths import WidthMap, reduce_heads

POSITION_COUNT = 128
FRAME_COUNT = 16
EXPERT_COUNT, EXPERTS_CHOSEN = 4, 2
WINDOW = 4


def small_config(config: PretrainedConfig, *, keep_heads: bool = True, depth: int | None = None) -> PretrainedConfig:
    """A copy with sizes reduced by rule.

    With `keep_heads` the numbers of heads and layers stay, and only widths shrink; without, there are a few heads, and
    `depth` layers where it is given (more if there are more kinds of layers).
    """
    config = copy.deepcopy(config)
    tree = list(nodes(config))
    if not keep_heads:
        reduce_heads(tree)
    WidthMap(tree, keep_heads).apply(tree)
    reduce_vocabulary(tree)
    if depth is not None:
        reduce_depth(tree, depth)
    for node in tree:
        reduce_counts(node)
        reduce_images(node, tree)
        reduce_rotary(node)
        reduce_overrides(node)
    apply_exceptions(tree)
    return config


def reduce_overrides(node: Node) -> None:
    """Layers with numbers of their own, for the layers that are left, in proportion to the numbers of the others."""
    spec = vars(node.config).get("_heterogeneity_spec")
    left = node.now("num_hidden_layers")
    if spec is None or not isinstance(left, int):
        return
    total = node.old["num_hidden_layers"]
    kinds, now = node.get("layer_types") or [], node.now("layer_types") or []
    own: dict[int | str, dict[str, Any]] = {}
    for place in range(left):
        # A layer stands for the first one of its kind, or for itself where all are left or there are no kinds.
        first = kinds.index(now[place]) if left < total and len(now) == left and now[place] in kinds else place
        if first in spec.per_layer_overrides:
            own[place] = {
                name: value * node.now(name) // node.old[name]
                if isinstance(value, int) and node.old.get(name)
                else value
                for name, value in spec.per_layer_overrides[first].items()
            }
    node.config.per_layer_config = own or None


def reduce_counts(node: Node) -> None:
    """Positions, windows, frames and experts."""
    for name, value in node.ints():
        if POSITIONS.search(name):
            node.set(name, min(value, POSITION_COUNT))
        elif FRAMES.search(name):
            node.set(name, min(value, FRAME_COUNT))
        elif WINDOWS.search(name):
            node.set(name, min(value, WINDOW))
        elif EXPERTS.search(name):
            node.set(name, min(value, EXPERT_COUNT))
        elif CHOSEN.search(name):
            node.set(name, min(value, EXPERTS_CHOSEN))
        elif name in ("n_group", "num_expert_group"):
            node.set(name, min(value, 2))
        elif name == "topk_group":
            node.set(name, min(value, 1))
        elif name == "frames_per_clip":
            node.set(name, min(value, 4))
        elif name == "mm_tokens_per_image":
            node.set(name, 4)
        elif name in ("num_queries", "encoder_seq_length", "num_query_tokens"):
            node.set(name, min(value, 10))
    if "fullatt_block_indexes" in node.old and "window_size" in node.old:
        # In pixels: two by two tokens, each of which is merged from several patches.
        node.set("window_size", 2 * (patch(node) or 1) * (node.get("spatial_merge_size") or 1))
    for name, values in node.lists():
        if WINDOWS.search(name) and all(isinstance(value, int) for value in values):
            node.set(name, [min(value, WINDOW) for value in values])


def patch(node: Node) -> Any:
    size = node.get("patch_size", "patch_sizes", "patch_stride", "encoder_stride")
    while isinstance(size, list | tuple):
        size = size[-1] if size else None
    return size


def patches(node: Node) -> int:
    """How many patches on a side; the last stage, of half the side of the one before, is not smaller than a window."""
    stages = node.get("depths", "hidden_sizes", "embed_dim_per_stage")
    if isinstance(stages, list | tuple):
        return WINDOW * int(2 ** (len(stages) - 1))
    return 2 * WINDOW if node.get("window_size", "global_attn_indexes") is not None else 4


def reduce_images(node: Node, tree: list[Node]) -> None:
    """Few patches, but several windows in models with windows; images of one size stay so across the tree."""
    name, size, own = image(node, tree)
    if size is None:
        return
    sides = [patches(other) for other in tree if image(other, tree)[1:] == (size, own)]
    new = own * max(sides)
    node.set(name, [min(new, one) for one in size] if isinstance(size, list | tuple) else min(new, size))


def image(node: Node, tree: list[Node]) -> tuple[str, Any, int]:
    """The name and the size of the images of one config, and the size of their patches."""
    name = next((name for name in ("image_size", "img_size", "crop_size", "input_size") if name in node.old), "")
    size = node.get(name)
    own = patch(node)
    if name == "input_size" and own is None:
        return "", None, 0
    own = own or next((found for other in tree if (found := patch(other))), 16)
    if not isinstance(own, int) or not isinstance(size, int | list | tuple):
        return "", None, 0
    return name, size, own
