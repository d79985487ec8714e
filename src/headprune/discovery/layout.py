"""From what moves what to the layout of a site: heads, their columns, what couples them, and every axis they own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from headprune.discovery.influence import Influence, NotReadableError
from headprune.units.spec import ROLES, Axis, Role


@dataclass(frozen=True)
class Rows:
    """The output rows of a linear map that a role reads, member after member (or unit after unit for k and v)."""

    linear: str
    role: Role
    table: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Layout:
    """A dense attention module as the experiment found it."""

    members: tuple[tuple[int, ...], ...]  # columns of each head; the heads of a unit stand side by side
    group: int  # heads that go together
    axes: tuple[Axis, ...]
    inputs: tuple[Axis, ...]  # arguments with a head axis
    roles: tuple[Rows, ...]  # q, k and v where they could be told apart

    @property
    def units(self) -> int:
        return len(self.members) // self.group


def merged(found: Layout, blocks: int) -> Layout | None:
    """Units that go together one of each block of neighbours, for code that counts on blocks of the same size."""
    units = found.units
    if units % blocks or units == blocks == 1:
        return None
    size = units // blocks
    together = [[start + block * size for block in range(blocks)] for start in range(size)]

    def joined(axis: Axis) -> Axis:
        parts = tuple(tuple(sorted(i for unit in own for i in axis.units[unit])) for own in together)
        return Axis(axis.tensor, axis.dim, axis.length, parts)

    order = [
        member for own in together for unit in own for member in range(unit * found.group, (unit + 1) * found.group)
    ]
    flat = [unit for own in together for unit in own]
    roles = tuple(
        Rows(rows.linear, rows.role, tuple(rows.table[i] for i in (order if rows.role == "q" else flat)))
        for rows in found.roles
        if len(rows.table) == (len(order) if rows.role == "q" else len(flat))
    )
    if blocks > 1 and found.group == 1:  # keys and values are then by head, which a unit of several heads does not have
        roles = tuple(rows for rows in roles if rows.role == "q")
    members = tuple(found.members[member] for member in order)
    return Layout(members, found.group * blocks, tuple(joined(axis) for axis in found.axes), (), roles)


def layout(
    found: Influence, linears: Mapping[str, tuple[str, str]], declared: int | None, *, inside: bool = True
) -> Layout:
    """The layout; `linears` maps a linear map's name to those of its weight and bias, `declared` is the head count that
    the module states, which decides how many heads a unit is said to have; `inside`: the output map is the module's."""
    queries = _partition(_query_sets(found, linears), found.columns)
    units = _components(found.columns, _column_sets(found), queries)
    if len(units) == 1 and declared != 1:
        raise NotReadableError(
            f"{_coupling(found, inside)} couples all its heads, so every head depends on all the others"
        )
    if len({len(unit) for unit in units}) > 1:
        raise NotReadableError(f"its units have different widths ({sorted({len(unit) for unit in units})} columns)")
    if len(units[0]) == 1:
        raise NotReadableError("its columns have nothing in common, so it has no heads")
    members, group = _members(units, queries, declared, found.columns)
    owners = _owners(units, found.columns)
    _refuse_norms_across_heads(found, linears)
    axes = tuple(_axes(found.axes, found.shapes, owners, len(units)))
    axes = _with_companions(axes, found.shapes, linears)
    shapes = {name: tuple(table.shape[1] for table in tables) for name, tables in found.arguments.items()}
    inputs = tuple(_axes(found.arguments, shapes, owners, len(units)))
    return Layout(members, group, axes, inputs, _roles(found, linears, axes, members, group))


def _column_sets(found: Influence) -> set[tuple[int, ...]]:
    """Sets of columns that one index of some axis moves together, those that move everything left out."""
    sets: set[tuple[int, ...]] = set()
    for tables in found.axes.values():
        for table in tables:
            counts = table.sum(0)
            selective = (counts > 1) & (counts < found.columns)
            for row in torch.unique(table[:, selective].t(), dim=0):
                sets.add(tuple(row.nonzero().flatten().tolist()))
    return sets


def _components(columns: int, sets: Iterable[tuple[int, ...]], queries: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """Columns that can only go together. What moves something of every head is shared by all, and couples none: with
    one key for all heads, each of them may go."""
    parent = list(range(columns))
    head = {column: number for number, query in enumerate(queries) for column in query}

    def root(column: int) -> int:
        while parent[column] != column:
            parent[column] = parent[parent[column]]
            column = parent[column]
        return column

    coupling = [s for s in sets if len(queries) < 2 or len({head[column] for column in s}) < len(queries)]
    for together in coupling:
        for column in together[1:]:
            parent[root(column)] = root(together[0])
    found: dict[int, list[int]] = {}
    for column in range(columns):
        found.setdefault(root(column), []).append(column)
    if not coupling:  # every index moves one column or all of them: one head
        return [list(range(columns))]
    return sorted(found.values())


def _partition(sets: set[tuple[int, ...]], columns: int) -> list[tuple[int, ...]]:
    """The sets if they are heads of the same width that share no column; none otherwise."""
    parts = sorted(sets)
    whole = sorted(column for part in parts for column in part) == list(range(columns))
    return parts if whole and len({len(part) for part in parts}) == 1 else []


def _refuse_norms_across_heads(found: Influence, linears: Mapping[str, tuple[str, str]]) -> None:
    """A norm over all heads has a scale for each of them, but what it is given moves everything."""
    for name, tables in found.axes.items():
        owner = name.rpartition(".")[0]
        counts = tables[0].sum(0)
        if len(tables) > 1 or "norm" not in owner.lower() or not bool(((counts > 0) & (counts < found.columns)).any()):
            continue
        for weight, _ in linears.values():
            if any(bool(table.all()) and table.shape[1] == len(counts) for table in found.axes.get(weight, [])[:1]):
                raise NotReadableError(f"{owner} normalises across heads, so every head depends on all the others")


def _coupling(found: Influence, inside: bool) -> str:
    """Name what couples everything: a norm by preference, since that is what usually does."""
    names = [
        name
        for name, tables in found.axes.items()
        # A norm of what the output map is given has a scale for every column of it.
        if any(bool(table.all(0).any()) for table in tables) or (inside and tables[0].shape[1] == found.columns)
    ]
    norms = [name.rpartition(".")[0] for name in names if "norm" in name.lower()]
    return norms[0] if norms else "something in its computation"


def _query_sets(found: Influence, linears: Mapping[str, tuple[str, str]]) -> set[tuple[int, ...]]:
    """Sets of columns that one query row moves: the heads, also where several of them share a key."""
    sets: set[tuple[int, ...]] = set()
    for name, (weight, _) in linears.items():
        for table in found.axes.get(weight, []):
            if name in found.elsewhere and table.shape[1] == len(found.elsewhere[name]):
                own = table[:, ~found.elsewhere[name]].t()
                several = own[(own.sum(1) > 1) & (own.sum(1) < found.columns)]
                sets.update(tuple(row.nonzero().flatten().tolist()) for row in torch.unique(several, dim=0))
    return sets


def _members(
    units: Sequence[list[int]], queries: Sequence[tuple[int, ...]], declared: int | None, columns: int
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Heads inside units: the columns that one query moves, or as many heads as the module declares."""
    width = len(units[0])
    place = {column: number for number, unit in enumerate(units) for column in unit}
    heads = sorted(queries, key=lambda part: (place[part[0]], part))
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
            owned = touched.sum(0) == 1
            if units == 1:  # one head owns what moves one column or more, if it is not simply everything
                owned = owned & (table.sum(0) < table.shape[0])
            if not bool(owned.any()) or not bool((touched & owned).any(1).all()):
                continue  # an axis of heads has something for every unit
            own = tuple(tuple((touched[unit] & owned).nonzero().flatten().tolist()) for unit in range(units))
            if len({len(indices) for indices in own}) == 1:
                yield Axis(name, dim, shapes[name][dim], own)


def _with_companions(
    axes: tuple[Axis, ...], shapes: Mapping[str, tuple[int, ...]], linears: Mapping[str, tuple[str, str]]
) -> tuple[Axis, ...]:
    """A bias has the rows of its weight, although a key's bias moves nothing: softmax does not see it."""
    weights = {weight: bias for weight, bias in linears.values() if bias in shapes}
    for name in shapes:  # parameters of the module itself that are named alike (nn.MultiheadAttention's)
        other = name.replace("weight", "bias")
        if "weight" in name and other in shapes:
            weights.setdefault(name, other)
    extra = []
    for axis in axes:
        bias = weights.get(axis.tensor)
        if bias is not None and shapes[bias] == (axis.length,):
            extra.append(Axis(bias, 0, axis.length, axis.units))
    replaced = {(axis.tensor, axis.dim) for axis in extra}
    return (*(axis for axis in axes if (axis.tensor, axis.dim) not in replaced), *extra)


def _roles(
    found: Influence,
    linears: Mapping[str, tuple[str, str]],
    axes: Sequence[Axis],
    members: Sequence[tuple[int, ...]],
    group: int,
) -> tuple[Rows, ...]:
    """Which rows are queries, keys and values: a query works on its own token, a value moves one column
    of each head."""
    rows: dict[Role, list[Rows]] = {role: [] for role in ROLES}
    for name, (weight, _) in linears.items():
        axis = next((axis for axis in axes if axis.tensor == weight and axis.length == _outputs(found, name)), None)
        if axis is None or name not in found.elsewhere:
            continue
        table = found.axes[weight][axis.dim]
        roles = [_role(bool(found.elsewhere[name][row]), int(table[:, row].sum()), group) for row in range(axis.length)]
        for role in ROLES:
            per_unit = [[row for row in unit if roles[row] == role] for unit in axis.units]
            if per_unit and len({len(unit) for unit in per_unit}) == 1 and per_unit[0]:
                rows[role].append(Rows(name, role, _by_member(role, per_unit, table, members, group)))
    return tuple(found_rows[0] for found_rows in rows.values() if found_rows)


def _outputs(found: Influence, name: str) -> int:
    return len(found.elsewhere[name]) if name in found.elsewhere else -1


def _role(elsewhere: bool, moved: int, group: int) -> Role:
    if not elsewhere:
        return "q"
    return "v" if moved <= group else "k"


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
    result = []
    for number, unit in enumerate(per_unit):
        for member in members[number * group : (number + 1) * group]:
            result.append(tuple(row for row in unit if bool(table[list(member), row].any())))
    return tuple(result)
