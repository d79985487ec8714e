"""Measured layouts as sites of a model, some of whose heads may have been removed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from headprune.discovery.layout import Layout, Rows
from headprune.hooks.torch_attention import original_class
from headprune.units.linear import is_transposed
from headprune.units.spec import LAST, Axis, Blocks, ForwardNeeds, Site

CROSS_WORDS = ("cross", "encoder_attn", "encdec", "enc_dec")  # in paths of attention to another sequence
CACHED_SITES = 1024


@dataclass(frozen=True, eq=False)  # the key of a cache, so each equals itself alone
class DenseSite:
    """An attention module of the dense model: its path, its layout, and the attributes that its forward reads."""

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
        """The inverse of `dataclasses.asdict`, also after a round trip through JSON."""
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
    """Lists as tuples, recursively."""
    if isinstance(value, (list, tuple)):
        return tuple(_tuples(item) for item in value)
    return {name: _tuples(item) for name, item in value.items()} if isinstance(value, dict) else value


def site_of(
    dense: DenseSite,
    index: int,
    removed: Sequence[int],
    *,
    stack: Any = "encoder",
    applications: int = 1,
) -> Site:
    """The site with these heads removed."""
    return _site_of(dense, index, tuple(removed), stack, applications)


# A model is resolved at every step, and most of its sites do not change between steps.
@functools.lru_cache(maxsize=CACHED_SITES)
def _site_of(dense: DenseSite, index: int, removed: tuple[int, ...], stack: Any, applications: int) -> Site:
    layout = dense.layout
    original, group = len(layout.members), layout.group
    kept = tuple(head for head in range(original) if head not in set(removed))
    units = [head // group for head in kept[::group]]
    axes = (*(_absolute(axis, dense.path) for axis in layout.axes), output_axis(dense))
    columns = {column: position for position, column in enumerate(axes[-1].left(units))}
    order = tuple(columns[column] for head in kept for column in layout.members[head])
    site = Site(
        proven=True,
        kind="heads",
        index=index,
        path=dense.path,
        o=dense.o,
        width=len(layout.members[0]),
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
    return replace(site, axes=tuple(axis.compacted(units_left) for axis, units_left in site.axes_left(units)))


def output_axis(dense: DenseSite) -> Axis:
    """The columns of the output map, by unit."""
    layout = dense.layout
    units = tuple(
        tuple(sorted(column for member in layout.members[start : start + layout.group] for column in member))
        for start in range(0, len(layout.members), layout.group)
    )
    return Axis(f"{dense.o}.weight", 0 if dense.conv1d else 1, sum(len(unit) for unit in units), units)


def _absolute(axis: Axis, path: str) -> Axis:
    return Axis(f"{path}.{axis.tensor}" if path else axis.tensor, axis.dim, axis.length, axis.units)


def _producers(dense: DenseSite, kept: Sequence[int], units: Sequence[int]) -> dict[str, Axis]:
    """The rows of queries by head, and of keys and values by unit, where the layout tells them apart."""
    producers: dict[str, Axis] = {}
    for rows in dense.layout.roles if kept else ():
        axis = next(axis for axis in dense.layout.axes if axis.tensor == f"{rows.linear}.weight")
        position = {row: index for index, row in enumerate(axis.left(units))}
        table = tuple(
            tuple(position[row] for row in rows.table[number]) for number in (kept if rows.role == "q" else units)
        )
        row_axis = Axis(axis.tensor, axis.dim, len(position), _regular(table, len(position)))
        producers[rows.role] = _absolute(row_axis, dense.path)
    return producers


def _regular(table: tuple[tuple[int, ...], ...], length: int) -> Sequence[Sequence[int]]:
    """`Blocks` where the rows are regularly spaced, which is faster than a table; the table otherwise."""
    count, width, offset = len(table), len(table[0]), table[0][0]
    stride = table[1][0] - offset if count > 1 else width
    rule = Blocks(count, ((offset, stride, width),))
    follows = all(rule[position] == list(rows) for position, rows in enumerate(table))
    return rule if follows and (stride == width or count * stride == length) else table


def kinds_of(model: nn.Module, paths: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """The classes of these modules as the modeling code defines them."""
    classes = []
    for path in paths:
        cls = original_class(model.get_submodule(path))
        classes.append((path, f"{cls.__module__}.{cls.__qualname__}"))
    return tuple(classes)


def is_conv1d(model: nn.Module, path: str) -> bool:
    return is_transposed(model.get_submodule(path))
