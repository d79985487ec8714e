"""Derives the layout of a site from measured influences: heads, their columns, couplings, and every axis with heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from headprune.discovery.influence import Influence, NotReadableError
from headprune.units.spec import ROLES, Axis, Role


@dataclass(frozen=True)
class Rows:
    """The output rows of a linear map for a role, member after member (or unit after unit for k and v)."""

    linear: str
    role: Role
    table: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Layout:
    """The measured layout of a dense attention module."""

    members: tuple[tuple[int, ...], ...]  # columns of each head; the heads of a unit stand side by side
    group: int  # heads of a unit
    axes: tuple[Axis, ...]
    inputs: tuple[Axis, ...]  # arguments with a head axis
    roles: tuple[Rows, ...]  # q, k and v where they can be distinguished

    @property
    def units(self) -> int:
        return len(self.members) // self.group


def merge_units(layout: Layout, blocks: int) -> Layout | None:
    """The layout whose units join one unit of each of `blocks` blocks, for code that needs blocks of equal size."""
    units = layout.units
    if units % blocks or units == blocks == 1:
        return None
    size = units // blocks
    new_units = [[start + block * size for block in range(blocks)] for start in range(size)]

    def join(axis: Axis) -> Axis:
        indices = tuple(tuple(sorted(i for unit in parts for i in axis.units[unit])) for parts in new_units)
        return Axis(axis.tensor, axis.dim, axis.length, indices)

    order = [
        member
        for parts in new_units
        for unit in parts
        for member in range(unit * layout.group, (unit + 1) * layout.group)
    ]
    flat = [unit for parts in new_units for unit in parts]
    roles = tuple(
        Rows(rows.linear, rows.role, tuple(rows.table[i] for i in (order if rows.role == "q" else flat)))
        for rows in layout.roles
        if len(rows.table) == (len(order) if rows.role == "q" else len(flat))
    )
    if blocks > 1 and layout.group == 1:  # k and v rows are by unit, and would be by head here
        roles = tuple(rows for rows in roles if rows.role == "q")
    members = tuple(layout.members[member] for member in order)
    return Layout(members, layout.group * blocks, tuple(join(axis) for axis in layout.axes), (), roles)


def layout(
    influence: Influence, linears: Mapping[str, tuple[str, str]], declared: int | None, *, inside: bool = True
) -> Layout:
    """The layout; `linears` maps the name of a linear map to those of its weight and bias, `declared` is the head count
    among the attributes of the module, which decides how many heads a unit has; `inside`: the output map is a
    submodule."""
    queries = _partition(_query_sets(influence, linears), influence.columns)
    units = _components(influence.columns, _column_sets(influence), queries)
    if len(units) == 1 and declared != 1:
        raise NotReadableError(
            f"{_coupling(influence, inside)} couples all its heads, so every head depends on all the others"
        )
    if len({len(unit) for unit in units}) > 1:
        raise NotReadableError(f"its units have different widths ({sorted({len(unit) for unit in units})} columns)")
    if len(units[0]) == 1:
        raise NotReadableError("its columns have nothing in common, so it has no heads")
    members, group = _members(units, queries, declared, influence.columns)
    owners = _owners(units, influence.columns)
    _refuse_norms_across_heads(influence, linears)
    axes = tuple(_axes(influence.axes, influence.shapes, owners, len(units)))
    axes = _with_companions(axes, influence.shapes, linears)
    shapes = {name: tuple(table.shape[1] for table in tables) for name, tables in influence.arguments.items()}
    inputs = tuple(_axes(influence.arguments, shapes, owners, len(units)))
    return Layout(members, group, axes, inputs, _roles(influence, linears, axes, members, group))


def _column_sets(influence: Influence) -> set[tuple[int, ...]]:
    """Sets of columns that one index of some axis influences together, without the sets of all columns."""
    sets: set[tuple[int, ...]] = set()
    for tables in influence.axes.values():
        for table in tables:
            counts = table.sum(0)
            selective = (counts > 1) & (counts < influence.columns)
            for row in torch.unique(table[:, selective].t(), dim=0):
                sets.add(tuple(row.nonzero().flatten().tolist()))
    return sets


def _components(count: int, sets: Iterable[tuple[int, ...]], queries: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Columns that can only be removed together. An index that influences every head is shared and couples none: with
    one key for all heads (multi-query attention), each head can be removed."""
    parent = list(range(count))
    head = {column: number for number, query in enumerate(queries) for column in query}

    def root(column: int) -> int:
        while parent[column] != column:
            parent[column] = parent[parent[column]]
            column = parent[column]
        return column

    coupling = [s for s in sets if len(queries) < 2 or len({head[column] for column in s}) < len(queries)]
    for columns_of_set in coupling:
        for column in columns_of_set[1:]:
            parent[root(column)] = root(columns_of_set[0])
    components: dict[int, list[int]] = {}
    for column in range(count):
        components.setdefault(root(column), []).append(column)
    if not coupling:  # every index influences one column or all of them: one head
        return [list(range(count))]
    return sorted(components.values())


def _partition(sets: set[tuple[int, ...]], columns: int) -> list[tuple[int, ...]]:
    """The sets if they partition the columns into heads of equal width; none otherwise."""
    parts = sorted(sets)
    whole = sorted(column for part in parts for column in part) == list(range(columns))
    return parts if whole and len({len(part) for part in parts}) == 1 else []


def _refuse_norms_across_heads(influence: Influence, linears: Mapping[str, tuple[str, str]]) -> None:
    """Raise for a norm over all heads: its scale belongs to single heads, but its input influences all of them."""
    for name, tables in influence.axes.items():
        owner = name.rpartition(".")[0]
        counts = tables[0].sum(0)
        if (
            len(tables) > 1
            or "norm" not in owner.lower()
            or not bool(((counts > 0) & (counts < influence.columns)).any())
        ):
            continue
        for weight, _ in linears.values():
            if any(bool(table.all()) and table.shape[1] == len(counts) for table in influence.axes.get(weight, [])[:1]):
                raise NotReadableError(f"{owner} normalises across heads, so every head depends on all the others")


def _coupling(influence: Influence, inside: bool) -> str:
    """The name of the module that couples all columns: a norm if there is one, the usual cause."""
    names = [
        name
        for name, tables in influence.axes.items()
        # A norm of the input of the output map has a scale for every column.
        if any(bool(table.all(0).any()) for table in tables) or (inside and tables[0].shape[1] == influence.columns)
    ]
    norms = [name.rpartition(".")[0] for name in names if "norm" in name.lower()]
    return norms[0] if norms else "something in its computation"


def _query_sets(influence: Influence, linears: Mapping[str, tuple[str, str]]) -> set[tuple[int, ...]]:
    """Sets of columns that one query row influences: the heads, also where several of them share a key."""
    sets: set[tuple[int, ...]] = set()
    for name, (weight, _) in linears.items():
        for table in influence.axes.get(weight, []):
            if name in influence.cross_token and table.shape[1] == len(influence.cross_token[name]):
                query_rows = table[:, ~influence.cross_token[name]].t()
                selective = query_rows[(query_rows.sum(1) > 1) & (query_rows.sum(1) < influence.columns)]
                sets.update(tuple(row.nonzero().flatten().tolist()) for row in torch.unique(selective, dim=0))
    return sets


def _members(
    units: Sequence[list[int]], queries: Sequence[tuple[int, ...]], declared: int | None, columns: int
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """The heads inside the units: the columns that one query influences, or as many heads as the module declares."""
    width = len(units[0])
    unit_of = {column: number for number, unit in enumerate(units) for column in unit}
    heads = sorted(queries, key=lambda part: (unit_of[part[0]], part))
    if declared and columns % declared == 0 and (len(heads[0]) if heads else width) % (columns // declared) == 0:
        size = columns // declared
        if not heads or size < len(heads[0]):
            heads = [tuple(unit[start : start + size]) for unit in units for start in range(0, width, size)]
    if not heads:
        heads = [tuple(unit) for unit in units]
    return tuple(heads), len(heads) // len(units)


def _owners(units: Sequence[list[int]], columns: int) -> torch.Tensor:
    """Bool [units x columns]."""
    table = torch.zeros(len(units), columns, dtype=torch.bool)
    for number, unit in enumerate(units):
        table[number, unit] = True
    return table


def _axes(
    tables: Mapping[str, list[torch.Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    owners: torch.Tensor,
    units: int,
) -> Iterable[Axis]:
    for name, parts in tables.items():
        for dim, table in enumerate(parts):
            touched = (owners.float() @ table.float()) > 0  # [units x indices]
            exclusive = touched.sum(0) == 1
            if units == 1:  # one head owns every index that influences some of the columns, not all
                exclusive = exclusive & (table.sum(0) < table.shape[0])
            if not bool(exclusive.any()) or not bool((touched & exclusive).any(1).all()):
                continue  # an axis with heads has indices of every unit
            indices_by_unit = tuple(
                tuple((touched[unit] & exclusive).nonzero().flatten().tolist()) for unit in range(units)
            )
            if len({len(indices) for indices in indices_by_unit}) == 1:
                yield Axis(name, dim, shapes[name][dim], indices_by_unit)


def _with_companions(
    axes: tuple[Axis, ...], shapes: Mapping[str, tuple[int, ...]], linears: Mapping[str, tuple[str, str]]
) -> tuple[Axis, ...]:
    """Add the biases, with the rows of their weights: a key's bias has no influence, softmax cancels it."""
    weights = {weight: bias for weight, bias in linears.values() if bias in shapes}
    for name in shapes:  # parameters of the module itself in pairs, as in nn.MultiheadAttention
        bias_name = name.replace("weight", "bias")
        if "weight" in name and bias_name in shapes:
            weights.setdefault(name, bias_name)
    extra = []
    for axis in axes:
        bias = weights.get(axis.tensor)
        if bias is not None and shapes[bias] == (axis.length,):
            extra.append(Axis(bias, 0, axis.length, axis.units))
    replaced = {(axis.tensor, axis.dim) for axis in extra}
    return (*(axis for axis in axes if (axis.tensor, axis.dim) not in replaced), *extra)


def _roles(
    influence: Influence,
    linears: Mapping[str, tuple[str, str]],
    axes: Sequence[Axis],
    members: Sequence[tuple[int, ...]],
    group: int,
) -> tuple[Rows, ...]:
    """Which rows are queries, keys and values: a query influences its own token only, a value one column of each
    head."""
    rows: dict[Role, list[Rows]] = {role: [] for role in ROLES}
    for name, (weight, _) in linears.items():
        axis = next((axis for axis in axes if axis.tensor == weight and axis.length == _outputs(influence, name)), None)
        if axis is None or name not in influence.cross_token:
            continue
        table = influence.axes[weight][axis.dim]
        roles = [
            _role(bool(influence.cross_token[name][row]), int(table[:, row].sum()), group) for row in range(axis.length)
        ]
        for role in ROLES:
            per_unit = [[row for row in unit if roles[row] == role] for unit in axis.units]
            if per_unit and len({len(unit) for unit in per_unit}) == 1 and per_unit[0]:
                rows[role].append(Rows(name, role, _by_member(role, per_unit, table, members, group)))
    return tuple(candidates[0] for candidates in rows.values() if candidates)


def _outputs(influence: Influence, name: str) -> int:
    return len(influence.cross_token[name]) if name in influence.cross_token else -1


def _role(cross_token: bool, columns: int, group: int) -> Role:
    if not cross_token:
        return "q"
    return "v" if columns <= group else "k"


def _by_member(
    role: Role,
    per_unit: Sequence[list[int]],
    table: torch.Tensor,
    members: Sequence[tuple[int, ...]],
    group: int,
) -> tuple[tuple[int, ...], ...]:
    """Query rows head after head inside their unit; k and v rows unit after unit."""
    if role != "q" or group == 1:
        return tuple(tuple(unit) for unit in per_unit)
    table_rows = []
    for number, unit in enumerate(per_unit):
        for member in members[number * group : (number + 1) * group]:
            table_rows.append(tuple(row for row in unit if bool(table[list(member), row].any())))
    return tuple(table_rows)
