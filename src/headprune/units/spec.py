"""What a site is, described by values only: an output linear map, blocks of its input columns, and the rows elsewhere
that produce them. Wherever something of the units lies, it is indices on an axis of a tensor."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, overload

import torch

from headprune.errors import UnsupportedModelError
from headprune.units.members import Member

Kind = Literal["heads", "neurons"]
Role = Literal["q", "k", "v"]
ROLES: tuple[Role, ...] = ("q", "k", "v")
WORDS: dict[Kind, str] = {"heads": "head", "neurons": "neuron"}  # one member, for people
LAST: dict[Kind, str] = {
    "heads": "the model does not run without any head here, so the last unit stays",
    "neurons": "the model does not run without any neuron here, so some must stay",
}


@dataclass(frozen=True)
class Blocks(Sequence[Sequence[int]]):
    """The indices of each unit by a rule, so that no table of thousands of neurons has to be made.

    A part of an axis has `width` neighbouring indices of every unit, `stride` apart. Separate projections have one
    part; fused ones have one for each of q, k and v, or, interleaved, one that is as wide as all three.
    """

    size: int  # units
    parts: tuple[tuple[int, int, int], ...]  # (offset, stride, width)

    @classmethod
    def contiguous(cls, size: int, width: int = 1) -> Blocks:
        """One unit after the other, with nothing between."""
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
        """Those of the units at these positions, part after part."""
        positions = list(positions)
        found: list[int] = []
        for offset, stride, width in self.parts:
            if width == 1:
                found += [offset + position * stride for position in positions]
            else:
                starts = [offset + position * stride for position in positions]
                found += [index for start in starts for index in range(start, start + width)]
        return found


@dataclass(frozen=True)
class Axis:
    """One axis of a tensor that has something of every unit; what belongs to none of them stays whatever goes."""

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
        """How many indices belong to units; each has as many as the others."""
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
        """The indices that stay if the units at these positions do."""
        staying = self.indices(positions)
        if self.owned < self.length:
            staying += {*range(self.length)} - {*self.indices(range(len(self.units)))}
        return sorted(staying)

    def length_with(self, units: int) -> int:
        """How long it is with so many units."""
        return self.length + (units - len(self.units)) * self.width

    def compacted(self, positions: Sequence[int]) -> Axis:
        """The axis when only the units at these positions are left."""
        place = {index: number for number, index in enumerate(self.left(positions))}
        units = tuple(tuple(place[index] for index in self.units[position]) for position in positions)
        return Axis(self.tensor, self.dim, len(place), units)

    def split(self, outputs: torch.Tensor) -> torch.Tensor:
        """From the outputs of a linear map [..., rows] the part of the units, [..., units, width]."""
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
    """What the forward code of a site needs to run with fewer units: read from a table, or found by trying."""

    # numbers that grow with the members, dotted inside a child, and their values in the dense model
    attributes: tuple[tuple[str, int], ...] = ()
    config: tuple[tuple[str, int], ...] = ()  # the same for what is read from the module's config
    inputs: tuple[tuple[str | int, int], ...] = ()  # (argument, axis) that come with all heads in them
    # How the site is run without units: not at all; on one unit whose maps give zeros; its maps give nothing, and the
    # rest of its code runs; "" where the last unit must stay.
    empty: Literal["bypass", "silent", "nothing", ""] = ""
    form: tuple[str, ...] | None = None  # what the module gives, a word for each part; None for a tensor alone
    quirk: str | None = None  # the behaviour in quirks.py that it gets; None where its code runs as it is
    delete: tuple[str, ...] = ()  # parameters that go with the last unit, as the maps do


@dataclass(frozen=True, kw_only=True)
class Site:
    """An output linear map, and the blocks of its input columns that can go.

    Members (heads, neurons) have original ids; positions are those in today's weights. A unit is what goes at once:
    `group` neighbouring members.
    """

    kind: Kind
    index: int
    path: str  # of the module that computes what the output map is given
    o: str  # path of the output linear map
    width: int  # input columns of one member
    group: int  # members that go together
    kept: tuple[int, ...]  # original ids of the members still present, in the order of the weights
    original: int  # how many there were
    axes: tuple[Axis, ...] = ()  # every axis that units own in the tensors that are there now
    maps: tuple[str, ...] = ()  # linear maps whose outputs become the members
    # The rows of each map, or of each block of a fused one: of q by member, of k and v by unit, of neurons by member;
    # those that could be told apart.
    producers: Mapping[str, Axis] = field(default_factory=dict, hash=False)
    needs: ForwardNeeds = ForwardNeeds()
    attention: Literal["self", "cross", ""] = ""  # empty where it is none
    stack: Literal["encoder", "decoder", "vision", "text"] = "encoder"
    family: str = "measured"  # the entry of the table that it was read by
    proven: bool = False  # whether removing its units has been shown to be exact
    memory: tuple[str, ...] = ()  # parameters with keys and values that heads have learned beside those of the tokens
    applications: int = 1  # how often one forward pass runs this site
    obstacle: str = ""  # why exact removal is impossible here; empty where it is possible
    order: tuple[int, ...] = ()  # the columns member after member, where they do not lie so; empty where they do

    @property
    def obstacle_to_emptying(self) -> str:
        """Why the last unit must stay; empty where it may go."""
        return self.obstacle or ("" if self.needs.empty else LAST[self.kind])

    @property
    def word(self) -> str:
        """One member, for people."""
        return WORDS[self.kind]

    @property
    def place(self) -> str:
        """Which part of a model it belongs to, for people."""
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
    def _places(self) -> dict[int, int]:
        return {member: place for place, member in enumerate(self.kept)}

    def position(self, member: int) -> int:
        """Where the member with this original id sits in today's weights."""
        return self._places[member]

    @property
    def gone(self) -> list[int]:
        """Original ids of the members that are not there any more."""
        return [member for member in range(self.original) if member not in self._places]

    def unit(self, member: int) -> tuple[Member, ...]:
        """All members that are removed together with this one."""
        first = member - member % self.group
        return tuple(Member(self.index, first + offset) for offset in range(self.group))

    def units(self) -> list[tuple[Member, ...]]:
        """The removable units that are still present."""
        return [self.unit(member) for member in self.kept[:: self.group]]

    def split(self, columns: torch.Tensor) -> torch.Tensor:
        """From the input columns of the output map [..., columns] the members, [..., members, width]."""
        if self.order:
            columns = columns.index_select(-1, torch.tensor(self.order, device=columns.device))
        return columns.unflatten(-1, (self.size, self.width))

    def join(self, members: torch.Tensor) -> torch.Tensor:
        """From the members [..., members, width] the columns as the output map is given them: `split` undone."""
        columns = members.flatten(-2)
        if not self.order:
            return columns
        back = torch.tensor(self.order, device=columns.device).argsort()
        return columns.index_select(-1, back)

    def columns(self, positions: Iterable[int]) -> list[int]:
        """Input columns of the output map that belong to the members at these positions."""
        places = [position * self.width + column for position in positions for column in range(self.width)]
        return [self.order[place] for place in places] if self.order else places

    @property
    def roles(self) -> Mapping[str, Axis]:
        """The rows that produce members, by role: q, k and v of heads, the maps of neurons; an error where they cannot
        be told apart."""
        if self.kept and self.attention and len(self.producers) < len(ROLES):
            raise UnsupportedModelError(
                f"The queries, keys and values of {self.path} cannot be told apart; use a criterion that looks at what "
                "heads give, such as residual-gradient or his."
            )
        return self.producers

    @property
    def producing_maps(self) -> list[str]:
        """The paths of the maps of all roles, each once."""
        return list(dict.fromkeys(axis.module for axis in self.roles.values()))

    def by_member(self, axis: Axis, values: torch.Tensor) -> torch.Tensor:
        """Values [..., units of the axis] for each member: heads that share a key take its value."""
        return values if len(axis.units) == self.size else values.repeat_interleave(self.group, dim=-1)

    def axes_left(self, units: Sequence[int]) -> list[tuple[Axis, Sequence[int]]]:
        """The axes of the tensors that are there when only the units at these positions are left, and what stays on
        each. With the last unit the linear maps go as a whole, and other tensors keep the form of one unit if the
        code of the site is run on it."""
        if units:
            return [(axis, units) for axis in self.axes]
        leaving = {*self.maps, self.o, *self.needs.delete}
        staying = () if self.needs.empty == "nothing" else (0,)
        return [(axis, staying) for axis in self.axes if axis.module not in leaving and axis.tensor not in leaving]
