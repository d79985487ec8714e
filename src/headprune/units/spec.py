"""What a site is, described by values only: an output linear map, blocks of its input columns, and the rows elsewhere
that produce them. An attention module is one kind of site."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from headprune.errors import UnsupportedModelError
from headprune.units.members import Member

LAST = "the model does not run without any head here, so the last unit stays"

Kind = Literal["heads", "neurons"]
Role = Literal["q", "k", "v"]
ROLES: tuple[Role, ...] = ("q", "k", "v")


@dataclass(frozen=True)
class Projection:
    """The rows of a linear map's output that belong to the heads of one role.

    Separate projections, blocks of a fused one and interleaved ones differ in `offset` and `stride` alone, so that
    everything downstream treats them alike.
    """

    module: str  # path of the Linear or Conv1D in the model
    role: Role
    heads: int  # heads present in the weight now
    width: int  # rows of one head
    offset: int = 0  # first row of the first head
    stride: int = 0  # rows from one head to the next
    table: tuple[tuple[int, ...], ...] | None = None  # the rows of each head, where they follow no such rule

    def rows(self, positions: Iterable[int]) -> list[int]:
        """Output rows of the heads at these current positions, head after head."""
        if self.table is not None:
            return [row for position in positions for row in self.table[position]]
        return [self.offset + position * self.stride + row for position in positions for row in range(self.width)]

    def of(self, outputs: torch.Tensor) -> torch.Tensor:
        """From the linear map's outputs [..., rows] this role's part, [..., heads, width]."""
        if self.table is not None:
            index = torch.tensor(self.rows(range(self.heads)), device=outputs.device)
            return outputs.index_select(-1, index).unflatten(-1, (self.heads, self.width))
        if self.stride == self.width:
            return outputs.narrow(-1, self.offset, self.heads * self.width).unflatten(-1, (self.heads, self.width))
        return outputs.unflatten(-1, (self.heads, self.stride)).narrow(-1, self.offset, self.width)


@dataclass(frozen=True)
class Axis:
    """One axis of a tensor that has something of every unit; what belongs to none of them stays whatever goes."""

    tensor: str  # path of the parameter or buffer in the model
    dim: int
    length: int
    units: tuple[tuple[int, ...], ...]  # the indices of each unit that is present

    def left(self, positions: Iterable[int]) -> list[int]:
        """The indices that stay if the units at these positions do."""
        gone = {index for unit in self.units for index in unit}
        staying = {index for position in positions for index in self.units[position]}
        return sorted({*range(self.length)} - gone | staying)

    @property
    def owned(self) -> int:
        """How many indices belong to units."""
        return sum(len(unit) for unit in self.units)

    def compacted(self, positions: Sequence[int]) -> Axis:
        """The axis when only the units at these positions are left."""
        place = {index: number for number, index in enumerate(self.left(positions))}
        units = tuple(tuple(place[index] for index in self.units[position]) for position in positions)
        return Axis(self.tensor, self.dim, len(place), units)


@dataclass(frozen=True, kw_only=True)
class Site:
    """An output linear map, and the blocks of its input columns that can go.

    Members (heads, neurons) have original ids; positions are those in today's weights. A unit is what goes at once:
    `group` neighbouring members.
    """

    kind: ClassVar[Kind]
    word: ClassVar[str]  # one member, for people

    index: int
    path: str  # of the module that computes what the output map is given
    o: str  # path of the output linear map
    width: int  # input columns of one member
    group: int  # members that go together
    kept: tuple[int, ...]  # original ids of the members still present, in the order of the weights
    original: int  # how many there were
    applications: int = 1  # how often one forward pass runs this site
    obstacle: str = ""  # why exact removal is impossible here; empty where it is possible
    order: tuple[int, ...] = ()  # the columns member after member, where they do not lie so; empty where they do

    @property
    def obstacle_to_emptying(self) -> str:
        """Why the last unit must stay; empty where it may go."""
        return self.obstacle

    @property
    def size(self) -> int:
        """Members that are left."""
        return len(self.kept)

    @property
    def place(self) -> str:
        """Which part of a model it belongs to, for people."""
        return ""

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

    @property
    def by_experiment(self) -> bool:
        """Whether its layout was measured, and so proven, rather than read from a table."""
        return False

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
    def producing_maps(self) -> Sequence[str]:
        """The paths of the linear maps whose outputs become the members, each once."""
        raise NotImplementedError

    def producers(self, positions: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
        """(module, output rows) elsewhere that produce the columns of these members; rows of one module may come in
        several pieces."""
        raise NotImplementedError


@dataclass(frozen=True)
class Recipe:
    """What the forward code of a measured module needs to run with fewer heads, found by trying."""

    attributes: tuple[
        tuple[str, int], ...
    ] = ()  # numbers that grow with the heads, dotted inside a child; dense values
    config: tuple[tuple[str, int], ...] = ()  # the same for what is read from the module's config
    inputs: tuple[tuple[str | int, int], ...] = ()  # (argument, axis) that come with all heads in them
    empty: Literal["bypass", "silent", ""] = ""  # how a site without heads is run; "" where the last one must stay
    form: tuple[str, ...] | None = None  # what the module gives, a word for each part; None for a tensor alone


@dataclass(frozen=True, kw_only=True)
class AttentionSite(Site):
    """One attention module as parameterised: its members are heads, its units the heads that share a KV head."""

    kind = "heads"
    word = "head"

    attention: Literal["self", "cross"]
    stack: Literal["encoder", "decoder", "vision", "text"]
    family: str
    q: Projection
    k: Projection
    v: Projection
    storage: Literal["separate", "fused", "interleaved"]
    conv1d: bool
    extras: tuple[Projection, ...] = ()  # further projections with a head axis (DeBERTa's positions)
    tensors: tuple[str, ...] = ()  # further parameters whose first axis has an entry of every head, by the table
    per_head: tuple[str, ...] = ()  # what else depends on the head axis, for people to read
    quirk: str = ""  # name of the behaviour in quirks.py that this family needs
    dense_axes: tuple[Axis, ...] = ()  # every axis that units own in the dense model, where the layout was measured
    maps: tuple[str, ...] = ()  # the linear maps among their owners
    recipe: Recipe | None = None  # what the forward code needs, where it was found by trying

    @property
    def by_experiment(self) -> bool:
        return self.recipe is not None

    @property
    def obstacle_to_emptying(self) -> str:
        if self.recipe is not None and not self.recipe.empty:
            return LAST
        return self.obstacle

    @functools.cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The axes of a measured site as they are now, when some units may have gone."""
        present = [member // self.group for member in self.kept[:: self.group]]
        return tuple(axis.compacted(present) for axis in self.dense_axes) if present else ()

    def share_of(self, path: str) -> tuple[int, int]:
        """How many rows of this map belong to heads, and of how many; all of them by the table."""
        axis = next((axis for axis in self.axes if axis.tensor == f"{path}.weight"), None)
        return (axis.owned, axis.length) if axis is not None else (1, 1)

    @property
    def roles(self) -> tuple[Projection, Projection, Projection]:
        """The rows of queries, keys and values; an error where they cannot be told apart."""
        if self.kept and not (self.q.module and self.k.module and self.v.module):
            raise UnsupportedModelError(
                f"The queries, keys and values of {self.path} cannot be told apart; use a criterion that looks at what "
                "heads give, such as residual-gradient or his."
            )
        return self.q, self.k, self.v

    @property
    def producing_maps(self) -> Sequence[str]:
        return list(dict.fromkeys(projection.module for projection in self.roles))

    @property
    def place(self) -> str:
        return f"{self.stack} {self.attention}"

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

    @property
    def projections(self) -> tuple[Projection, ...]:
        named = (self.q, self.k, self.v, *self.extras) if self.kept else ()
        return tuple(projection for projection in named if projection.module)

    def producers(self, positions: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
        groups = [position // self.group for position in positions[:: self.group]]
        for projection in self.projections:
            yield projection.module, projection.rows(positions if projection.role == "q" else groups)
