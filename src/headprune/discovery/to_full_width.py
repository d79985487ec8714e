"""Scales a layout that was measured on a narrow twin to the widths of the model: the same heads, only wider."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import nn

from headprune.discovery.layout import Layout, Rows
from headprune.discovery.sites_from_layouts import DenseSite, output_axis
from headprune.units.spec import Axis

Units = Sequence[Sequence[int]]
Table = tuple[tuple[int, ...], ...]


class NotScalableError(Exception):
    """The layout of the twin cannot be scaled to the size of the model; the message is the end of a sentence."""


def scale_to_width(dense: DenseSite, model: nn.Module) -> DenseSite:
    """The site of a dense `model` (only its shapes are read) that has the same heads as the twin."""
    layout = dense.layout
    axes = tuple(
        Axis(axis.tensor, axis.dim, length, _scaled(axis.units, axis.length, length))
        for axis in layout.axes
        for length in (_length(model, f"{dense.path}.{axis.tensor}", axis.dim),)
    )
    old = output_axis(dense)
    columns = _length(model, old.tensor, old.dim)
    members = _scaled(layout.members, old.length, columns)
    lengths = {axis.tensor: (axis.length, wide.length) for axis, wide in zip(layout.axes, axes, strict=True)}
    roles = tuple(rows for role in layout.roles if (rows := _rows(role, lengths)) is not None)
    module: Any = model.get_submodule(dense.path)
    needs = replace(
        dense.needs,
        attributes=tuple((name, _number(module, name)) for name, _ in dense.needs.attributes),
        config=tuple((name, getattr(module.config, name)) for name, _ in dense.needs.config),
    )
    return replace(dense, layout=Layout(members, layout.group, axes, layout.inputs, roles), needs=needs)


def _length(model: nn.Module, tensor: str, dim: int) -> int:
    path, _, name = tensor.rpartition(".")
    return int(getattr(model.get_submodule(path), name).shape[dim])


def _number(module: nn.Module, name: str) -> int:
    path, _, attribute = name.rpartition(".")
    return int(getattr(module.get_submodule(path), attribute))


def _scaled(units: Units, length: int, new_length: int) -> Table:
    """Index sets on an axis of another length: the order and the number of heads stay."""
    if length == new_length:
        return tuple(map(tuple, units))
    each = len(units[0])
    if each == 1:
        raise NotScalableError("one of its axes has another number of heads than in its small twin")
    if new_length % length == 0:
        ratio = new_length // length
        steps = {later - earlier for unit in units for earlier, later in pairwise(unit)}
        if len(steps) == 1 and steps != {1}:  # heads interleaved: one index of each head after the other
            (step,) = steps
            return tuple(tuple(unit[0] + step * index for index in range(each * ratio)) for unit in units)
        return tuple(tuple(index * ratio + part for index in unit for part in range(ratio)) for unit in units)
    whole = tuple(range(length))
    if tuple(index for unit in units for index in unit) == whole and new_length % len(units) == 0:
        width = new_length // len(units)
        return tuple(tuple(range(index * width, (index + 1) * width)) for index in range(len(units)))
    raise NotScalableError("its axes do not grow in proportion with the width of its heads")


def _rows(rows: Rows, lengths: dict[str, tuple[int, int]]) -> Rows | None:
    length, new_length = lengths[f"{rows.linear}.weight"]
    if new_length % length:  # queries and values of different widths in one map cannot be separated
        return None
    return Rows(rows.linear, rows.role, _scaled(rows.table, length, new_length))
