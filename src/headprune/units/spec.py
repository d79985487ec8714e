"""The definition of a site: an output linear map, blocks of its input columns, and the rows elsewhere that produce
them. Everything that belongs to units is indices on an axis of a tensor."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, overload

import torch

from headprune.errors import FormerName, UnsupportedModelError
from headprune.units.members import Member

Kind = Literal["heads", "neurons"]
Role = Literal["q", "k", "v"]
ROLES: tuple[Role, ...] = ("q", "k", "v")
WORDS: dict[Kind, str] = {"heads": "head", "neurons": "neuron"}  # one member, in messages
LAST: dict[Kind, str] = {
    "heads": "the model does not run without any head here, so the last unit stays",
    "neurons": "the model does not run without any neuron here, so some must stay",
}


@dataclass(frozen=True)
class Blocks(Sequence[Sequence[int]]):
    """The indices of each unit by a rule, so that thousands of neurons need no table.

    A part of an axis has `width` neighbouring indices of every unit, `stride` apart. Separate projections have one
    part; fused ones have one for each of q, k and v, or, interleaved, one that is as wide as all three.
    """

    size: int  # units
    parts: tuple[tuple[int, int, int], ...]  # (offset, stride, width)

    @classmethod
    def contiguous(cls, size: int, width: int = 1) -> Blocks:
        """One unit directly after the other."""
        return cls(size, ((0, width, width),))

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, position: int) -> list[int]: ...
    @overload
    def __getitem__(self, position: slice) -> list[list[int]]: ...
    def __getitem__(self, position: int | slice) -> list[int] | list[list[int]]:
        if isinstance(position, slice):
            return [self[number] for number in range(*position.indices(self.size))]
        if not 0 <= position < self.size:
            raise IndexError(position)
        return self.indices((position,))

    def indices(self, positions: Iterable[int]) -> list[int]:
        """The indices of the units at these positions, part after part."""
        positions = list(positions)
        indices: list[int] = []
        for offset, stride, width in self.parts:
            if width == 1:
                indices += [offset + position * stride for position in positions]
            else:
                starts = [offset + position * stride for position in positions]
                indices += [index for start in starts for index in range(start, start + width)]
        return indices


@dataclass(frozen=True)
class Axis:
    """One axis of a tensor with indices of every unit; indices that belong to no unit always stay."""

    tensor: str  # path of the parameter or buffer in the model
    dim: int
    length: int
    units: Sequence[Sequence[int]]  # the indices of each unit that is present: a table, or Blocks

    @property
    def module(self) -> str:
        """The path of the module that has the tensor."""
        return self.tensor.rpartition(".")[0]

    @property
    def owned(self) -> int:
        """How many indices belong to units; each unit has the same number."""
        return len(self.units) * self.width

    @property
    def width(self) -> int:
        """Indices of one unit."""
        if isinstance(self.units, Blocks):
            return sum(width for _, _, width in self.units.parts)
        return len(self.units[0]) if self.units else 0

    def indices(self, positions: Iterable[int]) -> list[int]:
        """The indices of the units at these positions."""
        if isinstance(self.units, Blocks):
            return self.units.indices(positions)
        return [index for position in positions for index in self.units[position]]

    def left(self, positions: Iterable[int]) -> list[int]:
        """The indices that are left if only the units at these positions are."""
        result = self.indices(positions)
        if self.owned < self.length:
            result += {*range(self.length)} - {*self.indices(range(len(self.units)))}
        return sorted(result)

    def length_with(self, units: int) -> int:
        """Its length with this number of units."""
        return self.length + (units - len(self.units)) * self.width

    def compacted(self, positions: Sequence[int]) -> Axis:
        """The axis when only the units at these positions are left."""
        new_index = {index: number for number, index in enumerate(self.left(positions))}
        units = tuple(tuple(new_index[index] for index in self.units[position]) for position in positions)
        return Axis(self.tensor, self.dim, len(new_index), units)

    def split(self, outputs: torch.Tensor) -> torch.Tensor:
        """The outputs of a linear map [..., rows] by unit: [..., units, width]."""
        count = len(self.units)
        if isinstance(self.units, Blocks) and len(self.units.parts) == 1:
            offset, stride, width = self.units.parts[0]
            if stride == width:
                return outputs.narrow(-1, offset, count * width).unflatten(-1, (count, width))
            if count * stride == self.length:
                return outputs.unflatten(-1, (count, stride)).narrow(-1, offset, width)
        index = torch.tensor([index for unit in self.units for index in unit], device=outputs.device)
        return outputs.index_select(-1, index).unflatten(-1, (count, self.width))


@dataclass(frozen=True)
class ForwardNeeds:
    """What the forward code of a site needs to run with fewer units: from the table of families, or discovered."""

    # attributes proportional to the members, by dotted names in children, and their values in the dense model
    attributes: tuple[tuple[str, int], ...] = ()
    config: tuple[tuple[str, int], ...] = ()  # the same for attributes of the module's config
    inputs: tuple[tuple[str | int, int], ...] = ()  # (argument, axis) with all heads
    # How the site runs without units: not at all; on one unit whose maps return zeros; with maps that return no
    # columns, so that the rest of its code runs; "" where the last unit must stay.
    empty: Literal["bypass", "silent", "nothing", ""] = ""
    form: tuple[str, ...] | None = None  # the outputs of the module, a word for each; None for a single tensor
    quirk: str | None = None  # its mixin in quirks.py; None where its code runs as it is
    delete: tuple[str, ...] = ()  # parameters that are deleted with the last unit, as the maps are


@dataclass(frozen=True, kw_only=True)
class Site:
    """An output linear map, and the blocks of its input columns that can be removed.

    Members (heads, neurons) have original ids; positions are those in the current weights. A unit is what is removed at
    once: `group` neighbouring members.
    """

    kind: Kind
    index: int
    path: str  # of the module that computes the inputs of the output map
    o: str  # path of the output linear map
    width: int  # input columns of one member
    group: int  # members that are removed together
    kept: tuple[int, ...]  # original ids of the members still present, in the order of the weights
    original: int  # members in the dense model
    axes: tuple[Axis, ...] = ()  # every axis with indices of units, in the current tensors
    maps: tuple[str, ...] = ()  # linear maps whose outputs become the members
    # The rows of each map, or of each block of a fused one: of q by member, of k and v by unit, of neurons by member;
    # only those that could be told apart.
    producers: Mapping[str, Axis] = field(default_factory=dict, hash=False)
    needs: ForwardNeeds = ForwardNeeds()
    attention: Literal["self", "cross", ""] = ""  # empty for a feed-forward layer
    stack: Literal["encoder", "decoder", "vision", "text"] = "encoder"
    family: str = "measured"  # its entry in the table of families, or "measured"
    proven: bool = False  # whether removing its units has been shown to be exact
    memory: tuple[str, ...] = ()  # parameters with learned keys and values of heads
    applications: int = 1  # how often one forward pass runs this site
    feeds_units: bool = False  # whether its outputs are the units of another site, and may be removed there
    obstacle: str = ""  # why exact removal is impossible here; empty where it is possible
    order: tuple[int, ...] = ()  # the columns member after member; empty where they are in that order

    @property
    def obstacle_to_emptying(self) -> str:
        """Why the last unit must stay; empty where it can be removed."""
        return self.obstacle or ("" if self.needs.empty else LAST[self.kind])

    @property
    def word(self) -> str:
        """A member, in messages."""
        return WORDS[self.kind]

    @property
    def place(self) -> str:
        """Its part of the model, in messages: "encoder self", "decoder feed-forward"."""
        return f"{self.stack} {self.attention or 'feed-forward'}"

    @property
    def size(self) -> int:
        """Members that are left."""
        return len(self.kept)

    @property
    def heads(self) -> int:
        return self.size

    @property
    def original_heads(self) -> int:
        return self.original

    @property
    def head_dim(self) -> int:
        return self.width

    @property
    def kv_heads(self) -> int:
        return self.size // self.group

    @functools.cached_property
    def _positions(self) -> dict[int, int]:
        return {member: position for position, member in enumerate(self.kept)}

    def position(self, member: int) -> int:
        """The position of the member with this original id in the current weights."""
        return self._positions[member]

    @property
    def removed(self) -> list[int]:
        """Original ids of the members that were removed."""
        return [member for member in range(self.original) if member not in self._positions]

    gone = FormerName("removed")

    def unit(self, member: int) -> tuple[Member, ...]:
        """All members that are removed together with this one."""
        first = member - member % self.group
        return tuple(Member(self.index, first + offset) for offset in range(self.group))

    def units(self) -> list[tuple[Member, ...]]:
        """The removable units that are still present."""
        return [self.unit(member) for member in self.kept[:: self.group]]

    def split(self, columns: torch.Tensor) -> torch.Tensor:
        """The input columns of the output map [..., columns] by member: [..., members, width]."""
        if self.order:
            columns = columns.index_select(-1, torch.tensor(self.order, device=columns.device))
        return columns.unflatten(-1, (self.size, self.width))

    def join(self, members: torch.Tensor) -> torch.Tensor:
        """The inverse of `split`: the columns of the output map from the members [..., members, width]."""
        columns = members.flatten(-2)
        if not self.order:
            return columns
        inverse = torch.tensor(self.order, device=columns.device).argsort()
        return columns.index_select(-1, inverse)

    def columns(self, positions: Iterable[int]) -> list[int]:
        """Input columns of the output map that belong to the members at these positions."""
        columns = [position * self.width + column for position in positions for column in range(self.width)]
        return [self.order[column] for column in columns] if self.order else columns

    @property
    def roles(self) -> Mapping[str, Axis]:
        """The rows that produce members, by role: q, k and v of heads, the maps of neurons; an error where they cannot
        be told apart."""
        if self.kept and self.attention and len(self.producers) < len(ROLES):
            raise UnsupportedModelError(
                f"The queries, keys and values of {self.path} cannot be told apart; use a criterion of the "
                "outputs of heads, such as residual-gradient or his."
            )
        return self.producers

    @property
    def producing_maps(self) -> list[str]:
        """The paths of the maps of all roles, each once."""
        return list(dict.fromkeys(axis.module for axis in self.roles.values()))

    def by_member(self, axis: Axis, values: torch.Tensor) -> torch.Tensor:
        """Values [..., units of the axis] repeated for each member: heads that share a KV head have its value."""
        return values if len(axis.units) == self.size else values.repeat_interleave(self.group, dim=-1)

    def axes_left(self, units: Sequence[int]) -> list[tuple[Axis, Sequence[int]]]:
        """The axes of the tensors that exist when only the units at these positions are left, and the units on each.
        With the last unit the linear maps are deleted, and other tensors keep the shape of one unit if the code of the
        site runs on it."""
        if units:
            return [(axis, units) for axis in self.axes]
        deleted = {*self.maps, self.o, *self.needs.delete}
        staying = () if self.needs.empty == "nothing" else (0,)
        return [(axis, staying) for axis in self.axes if axis.module not in deleted and axis.tensor not in deleted]
