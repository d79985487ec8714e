"""From what moves what to a layout, against closed forms: tables of influence written by hand, no model in sight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from headprune.discovery.influence import Influence, NotReadableError
from headprune.discovery.layout import Layout, Rows, layout, merge_units
from headprune.discovery.sites_from_layouts import DenseSite, site_of
from headprune.units.spec import Axis, ForwardNeeds

HEADS, WIDTH, HIDDEN = 4, 3, 5
COLUMNS = HEADS * WIDTH


def plain_columns(head: int) -> list[int]:
    return [head * WIDTH + inside for inside in range(WIDTH)]


def strided_columns(head: int) -> list[int]:
    return [inside * HEADS + head for inside in range(WIDTH)]


def table(rows: list[list[int]]) -> torch.Tensor:
    """Bool [columns x rows], from the columns that each row moves."""
    made = torch.zeros(COLUMNS, len(rows), dtype=torch.bool)
    for row, moved in enumerate(rows):
        made[moved, row] = True
    return made


def maps(columns=plain_columns, kv: int = HEADS) -> dict[str, list[list[int]]]:
    """Columns that each row of q, k and v moves, rows head after head: a query and a key those of the heads that see
    it, a value one of each."""
    group = HEADS // kv
    seen = [[column for head in range(c * group, (c + 1) * group) for column in columns(head)] for c in range(kv)]
    one = [[columns(head)[i] for head in range(c * group, (c + 1) * group)] for c in range(kv) for i in range(WIDTH)]
    return {
        "q": [columns(head) for head in range(HEADS) for _ in range(WIDTH)],
        "k": [seen[c] for c in range(kv) for _ in range(WIDTH)],
        "v": one,
    }


def influence(weights: Mapping[str, list[list[int]]], cross_token: Mapping[str, list[bool]]) -> Influence:
    everything = torch.ones(COLUMNS, HIDDEN, dtype=torch.bool)
    return Influence(
        columns=COLUMNS,
        axes={f"{name}.weight": [table(rows), everything] for name, rows in weights.items()},
        arguments={},
        shapes={f"{name}.weight": (len(rows), HIDDEN) for name, rows in weights.items()},
        cross_token={name: torch.tensor(flags) for name, flags in cross_token.items()},
    )


def separate(weights: Mapping[str, list[list[int]]]) -> Influence:
    return influence(weights, {name: [name != "q"] * len(rows) for name, rows in weights.items()})


def named(*names: str) -> dict[str, tuple[str, str]]:
    return {name: (f"{name}.weight", f"{name}.bias") for name in names}


def blocks(count: int, size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(block * size, (block + 1) * size)) for block in range(count))


def axes_of(actual: Layout) -> dict[tuple[str, int], tuple[tuple[int, ...], ...]]:
    return {(axis.tensor, axis.dim): axis.units for axis in actual.axes}


@pytest.mark.parametrize("declared", [HEADS, None])
def test_every_head_has_rows_of_its_own(declared: int | None) -> None:
    actual = layout(separate(maps()), named("q", "k", "v"), declared)
    own = blocks(HEADS, WIDTH)
    assert (actual.members, actual.group, actual.units, actual.inputs) == (own, 1, HEADS, ())
    assert axes_of(actual) == {(f"{name}.weight", 0): own for name in "qkv"}
    assert actual.roles == tuple(Rows(name, name, own) for name in "qkv")


@pytest.mark.parametrize("declared", [HEADS, None])
def test_heads_that_share_a_key_go_together(declared: int | None) -> None:
    actual = layout(separate(maps(kv=2)), named("q", "k", "v"), declared)
    assert (actual.members, actual.group, actual.units) == (blocks(HEADS, WIDTH), 2, 2)
    assert axes_of(actual) == {
        ("q.weight", 0): blocks(2, 2 * WIDTH),
        ("k.weight", 0): blocks(2, WIDTH),
        ("v.weight", 0): blocks(2, WIDTH),
    }
    assert actual.roles == (
        Rows("q", "q", blocks(HEADS, WIDTH)),
        Rows("k", "k", blocks(2, WIDTH)),
        Rows("v", "v", blocks(2, WIDTH)),
    )


def test_a_key_that_all_heads_share_couples_none() -> None:
    actual = layout(separate(maps(kv=1)), named("q", "k", "v"), HEADS)
    assert (actual.members, actual.group, actual.units) == (blocks(HEADS, WIDTH), 1, HEADS)
    assert axes_of(actual) == {("q.weight", 0): blocks(HEADS, WIDTH)}  # k and v stay whole


def interleaved() -> tuple[dict[str, list[list[int]]], dict[str, list[bool]]]:
    """Of each head the rows of q, k and v side by side in one map."""
    parts = maps()
    rows, flags = [], []
    for head in range(HEADS):
        for role in "qkv":
            rows += parts[role][head * WIDTH : (head + 1) * WIDTH]
            flags += [role != "q"] * WIDTH
    return {"qkv": rows}, {"qkv": flags}


def test_rows_of_a_fused_map_are_told_apart() -> None:
    actual = layout(influence(*interleaved()), named("qkv"), HEADS)
    assert actual.members == blocks(HEADS, WIDTH)
    assert axes_of(actual) == {("qkv.weight", 0): blocks(HEADS, 3 * WIDTH)}
    for place, rows in enumerate(actual.roles):
        starts = [(3 * head + place) * WIDTH for head in range(HEADS)]
        assert rows == Rows("qkv", "qkv"[place], tuple(tuple(range(s, s + WIDTH)) for s in starts))


def test_blocks_of_a_fused_map() -> None:
    parts = maps(kv=2)
    rows = {"qkv": [*parts["q"], *parts["k"], *parts["v"]]}
    flags = {"qkv": [False] * len(parts["q"]) + [True] * (len(parts["k"]) + len(parts["v"]))}
    actual = layout(influence(rows, flags), named("qkv"), HEADS)
    assert [rows.role for rows in actual.roles] == ["q", "k", "v"]
    assert [rows.table[1] for rows in actual.roles] == [(3, 4, 5), (15, 16, 17), (21, 22, 23)]
    assert axes_of(actual)["qkv.weight", 0][0] == (*range(6), *range(12, 15), *range(18, 21))


def test_columns_that_do_not_lie_side_by_side() -> None:
    actual = layout(separate(maps(strided_columns)), named("q", "k", "v"), HEADS)
    assert actual.members == tuple(tuple(strided_columns(head)) for head in range(HEADS))
    assert actual.group == 1
    dense = DenseSite("attn", "attn.o", ("attn.q", "attn.k", "attn.v"), actual, False, ForwardNeeds())
    site = site_of(dense, 0, [])
    given = torch.arange(COLUMNS)
    assert site.split(given).tolist() == [strided_columns(head) for head in range(HEADS)]
    assert torch.equal(site.join(site.split(given)), given)
    left = site_of(dense, 0, [1])  # columns close up
    assert (left.kept, left.columns([0])) == ((0, 2, 3), [0, 3, 6])
    assert left.axes[-1].length == COLUMNS - WIDTH


def test_a_bias_follows_the_rows_of_its_weight() -> None:
    """A key's bias moves nothing at all, since softmax does not see it."""
    actual = separate(maps())
    rows = HEADS * WIDTH
    actual.axes["k.bias"] = [torch.zeros(COLUMNS, rows, dtype=torch.bool)]
    actual.shapes["k.bias"] = (rows,)
    assert axes_of(layout(actual, named("q", "k", "v"), HEADS))["k.bias", 0] == blocks(HEADS, WIDTH)


def test_what_else_has_an_axis_of_heads() -> None:
    """Sinks of the module's own, a table with heads along its second axis, and an argument."""
    actual = separate(maps())
    by_head = table([plain_columns(head) for head in range(HEADS)])
    everything = torch.ones(COLUMNS, 7, dtype=torch.bool)
    actual.axes |= {"sinks": [by_head], "positions.weight": [everything, by_head]}
    actual.shapes |= {"sinks": (HEADS,), "positions.weight": (7, HEADS)}
    actual.arguments["bias"] = [everything[:, :2], by_head, everything]
    made = layout(actual, named("q", "k", "v"), HEADS)
    assert {axis for axis in axes_of(made) if axis[0][0] not in "qkv"} == {("sinks", 0), ("positions.weight", 1)}
    assert made.inputs == (Axis("bias", 1, HEADS, blocks(HEADS, 1)),)


def with_norm(name: str) -> Influence:
    """A scale for every row of the queries, all of which are normalised together."""
    everything = [list(range(COLUMNS))] * COLUMNS
    actual = separate({**maps(), "q": everything})
    actual.axes[f"{name}.weight"] = [table(maps()["q"])]
    actual.shapes[f"{name}.weight"] = (COLUMNS,)
    return actual


def test_a_norm_across_heads_is_named() -> None:
    with pytest.raises(NotReadableError, match="q_norm normalises across heads, so every head depends on all"):
        layout(with_norm("q_norm"), named("q", "k", "v"), HEADS)


def test_a_norm_inside_each_head_is_none_of_that() -> None:
    actual = separate(maps())
    actual.axes["q_norm.weight"] = [torch.ones(COLUMNS, WIDTH, dtype=torch.bool)]
    actual.shapes["q_norm.weight"] = (WIDTH,)
    assert layout(actual, named("q", "k", "v"), HEADS).units == HEADS


@pytest.mark.parametrize("inside", [True, False])
def test_what_couples_all_columns_is_named(inside: bool) -> None:
    """A norm of what the output map is given; one after the module's own output map would say nothing about heads."""
    everything = [list(range(COLUMNS))] * COLUMNS
    actual = separate({"q": everything, "k": everything, "v": everything})
    actual.axes["sub_norm.weight"] = [torch.eye(COLUMNS, dtype=torch.bool)]
    actual.shapes["sub_norm.weight"] = (COLUMNS,)
    said = "sub_norm couples all its heads" if inside else "something in its computation couples all its heads"
    with pytest.raises(NotReadableError, match=said):
        layout(actual, named("q", "k", "v"), HEADS, inside=inside)


def test_one_head_may_be_coupled_with_itself() -> None:
    everything = [list(range(COLUMNS))] * COLUMNS
    actual = separate({"q": everything, "k": everything, "v": [[column] for column in range(COLUMNS)]})
    made = layout(actual, named("q", "k", "v"), 1)
    assert (made.members, made.units) == ((tuple(range(COLUMNS)),), 1)


def test_units_of_different_widths_are_refused() -> None:
    wide, narrow = list(range(8)), list(range(8, COLUMNS))
    actual = separate({"q": [wide] * 8 + [narrow] * 4, "k": [wide] * 8 + [narrow] * 4})
    with pytest.raises(NotReadableError, match=r"different widths \(\[4, 8\] columns\)"):
        layout(actual, named("q", "k"), None)


def test_units_of_code_that_counts_on_blocks() -> None:
    """With two blocks, one unit of each goes at a time."""
    actual = layout(separate(maps()), named("q", "k", "v"), HEADS)
    made = merge_units(actual, 2)
    assert made is not None
    first, third = blocks(HEADS, WIDTH)[0], blocks(HEADS, WIDTH)[2]
    assert (made.units, made.group) == (2, 2)
    assert made.members[:2] == (first, third)
    assert axes_of(made)["v.weight", 0] == ((*first, *third), (*blocks(HEADS, WIDTH)[1], *blocks(HEADS, WIDTH)[3]))
    assert merge_units(actual, 3) is None
    assert merge_units(replace(actual, members=actual.members[:1]), 1) is None
