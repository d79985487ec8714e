"""Measured layouts as sites of a model, some of whose heads may have gone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from headprune.discovery.layout import Layout, Rows
from headprune.hooks.torch_attention import written_class
from headprune.units.linear import is_transposed
from headprune.units.spec import LAST, Axis, Blocks, ForwardNeeds, Site

CROSS_WORDS = ("cross", "encoder_attn", "encdec", "enc_dec")  # in paths of attention to another sequence
CACHED_SITES = 1024


@dataclass(frozen=True, eq=False)  # the key of a cache, so each equals itself alone
class DenseSite:
    """An attention module of the dense model: where it is, what it looks like, and what its forward code needs."""

    path: str
    o: str
    maps: tuple[str, ...]
    layout: Layout
    conv1d: bool
    needs: ForwardNeeds
    kinds: tuple[tuple[str, str], ...] = ()  # path -> class, of the module and its maps
    obstacle: str = ""

    @classmethod
    def from_plain(cls, plain: Any) -> DenseSite:
        """From what `dataclasses.asdict` and a json file made of it."""
        shape, needs = _tuples(plain["layout"]), _tuples(plain["needs"])
        layout = Layout(
            shape["members"],
            shape["group"],
            tuple(Axis(**axis) for axis in shape["axes"]),
            tuple(Axis(**axis) for axis in shape["inputs"]),
            tuple(Rows(**rows) for rows in shape["roles"]),
        )
        return cls(**{**_tuples(plain), "layout": layout, "needs": ForwardNeeds(**needs)})


def _tuples(value: Any) -> Any:
    """Lists as tuples, all the way down."""
    if isinstance(value, (list, tuple)):
        return tuple(_tuples(item) for item in value)
    return {name: _tuples(item) for name, item in value.items()} if isinstance(value, dict) else value


def site_of(
    dense: DenseSite,
    index: int,
    gone: Sequence[int],
    *,
    stack: Any = "encoder",
    applications: int = 1,
) -> Site:
    """The site as it is when these heads have gone."""
    return _site_of(dense, index, tuple(gone), stack, applications)


# A model is resolved at every step, and most of its sites are as they were.
@functools.lru_cache(maxsize=CACHED_SITES)
def _site_of(dense: DenseSite, index: int, gone: tuple[int, ...], stack: Any, applications: int) -> Site:
    found = dense.layout
    original, group = len(found.members), found.group
    kept = tuple(head for head in range(original) if head not in set(gone))
    units = [head // group for head in kept[::group]]
    axes = (*(_absolute(axis, dense.path) for axis in found.axes), output_axis(dense))
    columns = {column: place for place, column in enumerate(axes[-1].left(units))}
    order = tuple(columns[column] for head in kept for column in found.members[head])
    site = Site(
        proven=True,
        kind="heads",
        index=index,
        path=dense.path,
        o=dense.o,
        width=len(found.members[0]),
        group=group,
        kept=kept,
        original=original,
        axes=axes,
        maps=dense.maps,
        producers=_producers(dense, kept, units),
        needs=dense.needs,
        attention="cross" if any(word in dense.path.lower() for word in CROSS_WORDS) else "self",
        stack=stack,
        applications=applications,
        obstacle=dense.obstacle or ("" if dense.needs.empty or len(units) > 1 else LAST["heads"]),
        order=() if order == tuple(range(len(order))) else order,
    )
    return replace(site, axes=tuple(axis.compacted(staying) for axis, staying in site.axes_left(units)))


def output_axis(dense: DenseSite) -> Axis:
    """The columns of the output map, by unit."""
    found = dense.layout
    units = tuple(
        tuple(sorted(column for member in found.members[start : start + found.group] for column in member))
        for start in range(0, len(found.members), found.group)
    )
    return Axis(f"{dense.o}.weight", 0 if dense.conv1d else 1, sum(len(unit) for unit in units), units)


def _absolute(axis: Axis, path: str) -> Axis:
    return Axis(f"{path}.{axis.tensor}" if path else axis.tensor, axis.dim, axis.length, axis.units)


def _producers(dense: DenseSite, kept: Sequence[int], units: Sequence[int]) -> dict[str, Axis]:
    """The rows of queries by head, and of keys and values by unit, as far as they are known."""
    producers: dict[str, Axis] = {}
    for rows in dense.layout.roles if kept else ():
        axis = next(axis for axis in dense.layout.axes if axis.tensor == f"{rows.linear}.weight")
        place = {row: number for number, row in enumerate(axis.left(units))}
        table = tuple(tuple(place[row] for row in rows.table[which]) for which in (kept if rows.role == "q" else units))
        own = Axis(axis.tensor, axis.dim, len(place), _regular(table, len(place)))
        producers[rows.role] = _absolute(own, dense.path)
    return producers


def _regular(table: tuple[tuple[int, ...], ...], length: int) -> Sequence[Sequence[int]]:
    """By a rule where the rows follow one, which is faster than a table."""
    count, width, offset = len(table), len(table[0]), table[0][0]
    stride = table[1][0] - offset if count > 1 else width
    rule = Blocks(count, ((offset, stride, width),))
    follows = all(rule[position] == list(rows) for position, rows in enumerate(table))
    return rule if follows and (stride == width or count * stride == length) else table


def kinds_of(model: nn.Module, paths: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The classes of these modules as their code has them."""
    found = []
    for path in paths:
        kind = written_class(model.get_submodule(path))
        found.append((path, f"{kind.__module__}.{kind.__qualname__}"))
    return tuple(found)


def is_conv1d(model: nn.Module, path: str) -> bool:
    return is_transposed(model.get_submodule(path))
