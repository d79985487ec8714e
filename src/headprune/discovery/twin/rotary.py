"""Rotary embeddings of narrow heads: sections and factors of half the rotary width."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from .config_patterns import HEADS, KV_HEADS
from .config_tree import Node, mappings
from .widths import main_width

SECTIONS = ("mrope_section", "xdrope_section", "rope_section")
FACTORS = ("long_factor", "short_factor")


def reduce_rotary(node: Node) -> None:
    head = head_width(node)
    before = head_width(node, before=True)
    for name in ("rotary_dim", "rotary_emb_dim"):
        if isinstance(node.old.get(name), int) and head and before:
            node.set(name, max(2, node.old[name] * head // before // 2 * 2))
    for name in ("rope_parameters", "rope_scaling", "default_theta"):
        for rope in mappings(node.current(name)):
            reduce_rope(rope, head, node)
    for name in SECTIONS:
        if isinstance(node.old.get(name), list | tuple) and head:
            node.set(name, sections(node.old[name], head // 2))


def head_width(node: Node, before: bool = False) -> int | None:
    """The width of the rotated part of a head."""
    values = node.old if before else vars(node.config)
    for name in ("qk_rope_head_dim", "head_dim", "attention_head_dim", "d_kv", "kv_channels"):
        if isinstance(values.get(name), int) and values[name]:
            return int(values[name])
    heads = next((values[name] for name, _ in node.ints() if HEADS.search(name) and not KV_HEADS.search(name)), None)
    width = values.get(main_width(node)[0])
    return width // heads if heads and width else None


def reduce_rope(rope: MutableMapping[str, Any], head: int | None, node: Node) -> None:
    positions = node.current("max_position_embeddings")
    if rope.get("original_max_position_embeddings") and isinstance(positions, int):
        rope["original_max_position_embeddings"] = max(8, min(rope["original_max_position_embeddings"], positions // 2))
    if not head:
        return
    rotary_width = int(head * (rope.get("partial_rotary_factor") or 1.0))
    for name in SECTIONS:
        if isinstance(rope.get(name), list | tuple):
            rope[name] = sections(rope[name], rotary_width // 2)
    for name in FACTORS:
        if isinstance(rope.get(name), list | tuple):
            rope[name] = list(rope[name])[: rotary_width // 2]


def sections(old: Any, total: int) -> list[int]:
    """The same number of sections, roughly in proportion, none empty where `total` allows."""
    parts = [max(1, total * part // max(1, sum(old))) for part in old]
    while sum(parts) < total:
        parts[-1] += 1
    while sum(parts) > total and max(parts) > 0:
        parts[parts.index(max(parts))] -= 1
    return parts
