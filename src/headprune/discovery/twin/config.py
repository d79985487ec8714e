"""Small configs of the same architecture."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PretrainedConfig

from .config_patterns import EXPERTS, EXPERTS_PER_TOKEN, FRAMES, POSITIONS, WINDOWS
from .config_tree import Node, nodes
from .exceptions_by_model_type import apply_exceptions
from .layers import reduce_depth
from .rotary import reduce_rotary
from .tokens import reduce_vocabulary
from .widths import WidthMap, reduce_heads

POSITION_COUNT = 128
FRAME_COUNT = 16
EXPERT_COUNT, EXPERTS_CHOSEN = 4, 2
WINDOW = 4


def small_config(config: PretrainedConfig, *, keep_heads: bool = True, depth: int | None = None) -> PretrainedConfig:
    """A copy with reduced sizes.

    With `keep_heads` the numbers of heads and layers stay, and only widths shrink; without, there are a few heads.
    `depth` is the number of layers (more if there are more kinds of layers); None keeps it.
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
    """Per-layer overrides for the remaining layers, scaled like the values of the config."""
    spec = vars(node.config).get("_heterogeneity_spec")
    count = node.current("num_hidden_layers")
    if spec is None or not isinstance(count, int):
        return
    total = node.old["num_hidden_layers"]
    kinds, kept_kinds = node.get("layer_types") or [], node.current("layer_types") or []
    overrides: dict[int | str, dict[str, Any]] = {}
    for layer in range(count):
        # A layer takes the overrides of the first layer of its kind, or its own where no layer was dropped.
        first = (
            kinds.index(kept_kinds[layer])
            if count < total and len(kept_kinds) == count and kept_kinds[layer] in kinds
            else layer
        )
        if first in spec.per_layer_overrides:
            overrides[layer] = {
                name: value * node.current(name) // node.old[name]
                if isinstance(value, int) and node.old.get(name)
                else value
                for name, value in spec.per_layer_overrides[first].items()
            }
    node.config.per_layer_config = overrides or None


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
        elif EXPERTS_PER_TOKEN.search(name):
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
        # In pixels: two by two tokens, each merged from several patches.
        node.set("window_size", 2 * (patch_size(node) or 1) * (node.get("spatial_merge_size") or 1))
    for name, values in node.lists():
        if WINDOWS.search(name) and all(isinstance(value, int) for value in values):
            node.set(name, [min(value, WINDOW) for value in values])


def patch_size(node: Node) -> Any:
    size = node.get("patch_size", "patch_sizes", "patch_stride", "encoder_stride")
    while isinstance(size, list | tuple):
        size = size[-1] if size else None
    return size


def patches_per_side(node: Node) -> int:
    """Patches per side: each stage halves the side, and the last stage is not smaller than a window."""
    stages = node.get("depths", "hidden_sizes", "embed_dim_per_stage")
    if isinstance(stages, list | tuple):
        return WINDOW * int(2 ** (len(stages) - 1))
    return 2 * WINDOW if node.get("window_size", "global_attn_indexes") is not None else 4


def reduce_images(node: Node, tree: list[Node]) -> None:
    """Few patches, but several windows in models with windows; equal image sizes stay equal across the tree."""
    name, size, patch = image_sizes(node, tree)
    if size is None:
        return
    counts = [patches_per_side(other) for other in tree if image_sizes(other, tree)[1:] == (size, patch)]
    side = patch * max(counts)
    node.set(name, [min(side, length) for length in size] if isinstance(size, list | tuple) else min(side, size))


def image_sizes(node: Node, tree: list[Node]) -> tuple[str, Any, int]:
    """The attribute name and value of the image size of a config, and its patch size."""
    name = next((name for name in ("image_size", "img_size", "crop_size", "input_size") if name in node.old), "")
    size = node.get(name)
    patch = patch_size(node)
    if name == "input_size" and patch is None:
        return "", None, 0
    patch = patch or next((value for other in tree if (value := patch_size(other))), 16)
    if not isinstance(patch, int) or not isinstance(size, int | list | tuple):
        return "", None, 0
    return name, size, patch
