"""Heads and widths: values that are equal anywhere in a tree of configs stay equal, and heads still divide widths."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, pairwise
from math import lcm
from typing import Any

from .config_patterns import FFN, HEAD_WIDTH, HEADS, KV_HEADS, LATENT, NO_WIDTH, WIDTH
from .config_tree import Node

HEAD = 8
HEAD_COUNT, KV_COUNT = 4, 2
MAIN = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "hidden_dim", "text_encoder_width")
EXPLICIT = ("head_dim", "d_kv", "d_head", "kv_channels", "dim_head", "attention_head_size", "attention_head_dim")


def is_width(name: str) -> bool:
    return bool(WIDTH.search(name)) and not (NO_WIDTH.search(name) or HEAD_WIDTH.search(name) or LATENT.search(name))


def reduce_heads(tree: list[Node]) -> None:
    """Few heads, and fewer key-value heads where the model has fewer; lists (a count per stage) stay the same."""
    for node in tree:
        queries = max(
            (value for name, value in node.ints() if HEADS.search(name) and not KV_HEADS.search(name)), default=0
        )
        for name, value in node.ints():
            if HEADS.search(name) and value > 0:
                node.set(name, small_head_count(value, queries, bool(KV_HEADS.search(name))))
        for name, values in node.lists():
            if name.endswith("heads_per_layer"):
                node.set(name, [small_head_count(value, queries, bool(KV_HEADS.search(name))) for value in values])
        linear = node.get("linear_num_key_heads"), node.get("linear_num_value_heads")
        if None not in linear and linear[0] < linear[1]:
            node.set("linear_num_key_heads", KV_COUNT)


def small_head_count(value: int, queries: int, shared: bool) -> int:
    if shared and value < queries:
        return 1 if value == 1 else KV_COUNT
    return value if value < 3 else HEAD_COUNT


def head_counts(node: Node) -> list[int]:
    counts = [node.current(name) for name, value in node.ints() if HEADS.search(name) and value > 0]
    for name, values in node.lists():
        if HEADS.search(name) and all(isinstance(value, int) for value in values):
            counts += node.current(name)
    return counts


def main_width(node: Node) -> tuple[str, Any]:
    """The width of the residual stream of one config."""
    return next(((name, node.old[name]) for name in MAIN if isinstance(node.old.get(name), int)), ("", None))


def head_splits_width(node: Node) -> bool:
    """Whether the width of a head is that of the residual stream divided by the number of heads."""
    explicit = node.get(*EXPLICIT)
    width = main_width(node)[1]
    heads = [value for name, value in node.ints() if HEADS.search(name) and not KV_HEADS.search(name)]
    return not isinstance(explicit, int) or (bool(heads) and explicit * heads[0] == width)


def heads_per_stage(node: Node) -> dict[str, list[int]]:
    """Heads per stage in vision models whose stages grow wider."""
    return {
        name: values
        for name, values in node.lists()
        if HEADS.search(name) and not name.endswith("_per_layer") and all(isinstance(value, int) for value in values)
    }


class WidthMap:
    """Maps the widths of a tree of configs to small ones."""

    def __init__(self, tree: list[Node], keep_heads: bool) -> None:
        self.keep_heads = keep_heads
        self.mapping: dict[int, int] = {}
        self.stages(tree)
        self.streams(tree)
        fresh_ffn = (24 + 16 * step for step in count())
        fresh = (96 + 64 * step for step in count())
        for name, value in all_widths(tree):
            if value not in self.mapping and FFN.search(name) and value > 64:
                self.mapping[value] = next(fresh_ffn)
        for node in tree:
            width = main_width(node)[1]
            if (
                width in self.mapping
                and "attention_hidden_size" in node.old
                and node.old["attention_hidden_size"] == 2 * width
            ):
                self.mapping.setdefault(2 * width, 2 * self.mapping[width])
        for _name, value in all_widths(tree):
            if value not in self.mapping and value >= 128:
                self.mapping[value] = next(fresh)

    def stages(self, tree: list[Node]) -> None:
        for node in tree:
            for heads in heads_per_stage(node).values():
                first = node.get("embed_dim", "embedding_size", "patch_embeds_hidden_size")
                doubling = all(later == 2 * earlier for earlier, later in pairwise(heads))
                if isinstance(first, int) and doubling:
                    for stage in range(len(heads) + 1):
                        self.mapping.setdefault(first * 2**stage, heads[0] * HEAD * 2**stage)
                for name, values in node.lists():
                    if is_width(name) and len(values) == len(heads) and all(isinstance(value, int) for value in values):
                        for value, number in zip(values, heads, strict=True):
                            self.mapping.setdefault(value, number * HEAD)

    def streams(self, tree: list[Node]) -> None:
        """Map the widths of residual streams; different ones stay different."""
        divisors: dict[int, int] = {}
        free: set[int] = set()
        for node in tree:
            width = main_width(node)[1]
            counts = [number for number in head_counts(node) if number]
            if width is None or heads_per_stage(node) or width < 16:
                continue
            if not counts and node.path and width not in divisors:
                continue
            if head_splits_width(node):
                divisors[width] = lcm(divisors.get(width, 1), *counts)
            else:
                free.add(width)
                divisors.setdefault(width, 1)
        used = set(self.mapping.values())
        for width, divisor in sorted(divisors.items()):
            if width in self.mapping and self.mapping[width] % divisor == 0:
                continue
            # A width that is twice another stays so: some streams concatenate two tokens of another.
            double = 2 * self.mapping.get(width // 2, 0) if width % 2 == 0 else 0
            if double and double % divisor == 0 and double not in used and width not in free:
                self.mapping[width] = double
                used.add(double)
                continue
            if self.keep_heads and width not in free:
                step = divisor * HEAD if divisor > 2 else 32
            else:
                step = lcm(32, divisor)
            candidate = step * 2 if width in free else step
            while candidate in used and candidate < 8 * step:
                candidate += step
            self.mapping[width] = candidate
            used.add(candidate)

    def apply(self, tree: list[Node]) -> None:
        for node in tree:
            for name, value in node.ints():
                if is_width(name) and value in self.mapping:
                    node.set(name, self.mapping[value])
            for name, values in node.lists():
                if is_width(name) and all(isinstance(value, int) and value in self.mapping for value in values):
                    node.set(name, [self.mapping[value] for value in values])
            self.heads(node)

    def heads(self, node: Node) -> None:
        """Reduce the widths of heads and the latent ranks of keys and queries."""
        nope = node.get("qk_nope_head_dim")
        latent = bool(nope and node.get("kv_lora_rank", "q_lora_rank"))
        unit = nope / HEAD if latent else None
        explicit = node.get(*EXPLICIT)
        for name, value in node.ints():
            if LATENT.search(name) and value > 16:
                node.set(name, 24 if name.startswith("q") else 16)
            if not HEAD_WIDTH.search(name) or value < 16:
                continue
            if unit:
                node.set(name, max(4, int(value / unit) // 2 * 2))
            elif value == explicit and head_splits_width(node):
                heads = next((node.current(n) for n, v in node.ints() if HEADS.search(n) and not KV_HEADS.search(n)), 1)
                node.set(name, max(1, self.mapping.get(main_width(node)[1], main_width(node)[1]) // heads))
            else:
                node.set(name, HEAD * max(1, value // explicit) if isinstance(explicit, int) and explicit else HEAD)
        if latent and node.get("qk_head_dim") is not None:
            node.set("qk_head_dim", node.current("qk_nope_head_dim") + node.current("qk_rope_head_dim"))
        mamba(node)


def mamba(node: Node) -> None:
    """State-space layers: heads times their width is the expanded stream."""
    width = node.current(main_width(node)[0])
    expand = node.get("mamba_expand", "expand")
    heads, size = (
        next((name for name in names if node.get(name) is not None), "")
        for names in (
            ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"),
            ("mamba_d_head", "mamba_head_dim", "mamba_headdim"),
        )
    )
    complete = heads and size and width and expand and isinstance(node.old[size], int)
    if complete and node.old[heads] * node.old[size] == expand * main_width(node)[1]:
        node.set(heads, HEAD_COUNT)
        node.set(size, int(expand * width) // HEAD_COUNT)
    if isinstance(node.get("mamba_d_ssm"), int) and heads and size:
        node.set("mamba_d_ssm", 2 * HEAD * HEAD_COUNT)
        node.set(heads, HEAD_COUNT)
        node.set(size, 2 * HEAD)
    for name in ("n_groups", "mamba_n_groups"):
        if heads and isinstance(node.old.get(name), int):
            node.set(name, min(node.old[name], 2))
    for name in ("mamba_d_state", "ssm_state_size", "state_size", "mamba_dt_rank", "time_step_rank"):
        if isinstance(node.old.get(name), int) and node.old[name] > 16:
            node.set(name, 16)


def all_widths(tree: list[Node]) -> Iterator[tuple[str, int]]:
    for node in tree:
        for name, value in node.ints():
            if is_width(name):
                yield name, value
