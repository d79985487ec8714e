"""A layout that was measured on a small twin, for the model at its own size: the same heads, only wider."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import nn

from headprune.discovery.dense_site import DenseSite, output_axis
from headprune.discovery.layout import Layout, Rows
from headprune.units.spec import Axis

Units = Sequence[Sequence[int]]
Table = tuple[tuple[int, ...], ...]


class NotStretchableError(Exception):
    """The layout of the twin does not say what it is at another size; the text is the end of a sentence."""


def stretched(dense: DenseSite, model: nn.Module) -> DenseSite:
    """The site of a dense `model` (its shapes are all that is looked at) that has the same heads as the twin."""
    found = dense.layout
    axes = tuple(
        Axis(axis.tensor, axis.dim, length, _wider(axis.units, axis.length, length))
        for axis in found.axes
        for length in (_length(model, f"{dense.path}.{axis.tensor}", axis.dim),)
    )
    old = output_axis(dense)
    columns = _length(model, old.tensor, old.dim)
    members = _wider(found.members, old.length, columns)
    lengths = {axis.tensor: (axis.length, wide.length) for axis, wide in zip(found.axes, axes, strict=True)}
    roles = tuple(rows for role in found.roles if (rows := _rows(role, lengths)) is not None)
    module: Any = model.get_submodule(dense.path)
    needs = replace(
        dense.needs,
        attributes=tuple((name, _number(module, name)) for name, _ in dense.needs.attributes),
        config=tuple((name, getattr(module.config, name)) for name, _ in dense.needs.config),
    )
    return replace(dense, layout=Layout(members, found.group, axes, found.inputs, roles), needs=needs)


def _length(model: nn.Module, tensor: str, dim: int) -> int:
    path, _, name = tensor.rpartition(".")
    return int(getattr(model.get_submodule(path), name).shape[dim])


def _number(module: nn.Module, name: str) -> int:
    path, _, attribute = name.rpartition(".")
    return int(getattr(module.get_submodule(path), attribute))


def _wider(units: Units, length: int, wanted: int) -> Table:
    """Index sets on an axis of another length: heads keep their order and their number."""
    if length == wanted:
        return tuple(map(tuple, units))
    each = len(units[0])
    if each == 1:
        raise NotStretchableError("one of its axes has another number of heads than in its small twin")
    if wanted % length == 0:
        ratio = wanted // length
        steps = {later - earlier for unit in units for earlier, later in pairwise(unit)}
        if len(steps) == 1 and steps != {1}:  # heads side by side, one index of each after the other
            (step,) = steps
            return tuple(tuple(unit[0] + step * place for place in range(each * ratio)) for unit in units)
        return tuple(tuple(index * ratio + part for index in unit for part in range(ratio)) for unit in units)
    whole = tuple(range(length))
    if tuple(index for unit in units for index in unit) == whole and wanted % len(units) == 0:
        width = wanted // len(units)
        return tuple(tuple(range(place * width, (place + 1) * width)) for place in range(len(units)))
    raise NotStretchableError("its axes do not grow in proportion with the width of its heads")


def _rows(rows: Rows, lengths: dict[str, tuple[int, int]]) -> Rows | None:
    length, wanted = lengths[f"{rows.linear}.weight"]
    if wanted % length:  # queries and values of different widths in one map: which is which is not known there
        return None
    return Rows(rows.linear, rows.role, _wider(rows.table, length, wanted))
