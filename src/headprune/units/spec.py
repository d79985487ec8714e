"""What a site is, described by values only: an output linear map, blocks of its input columns, and the rows elsewhere
that produce them. An attention module is one kind of site."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from headprune.units.members import Member

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
    offset: int  # first row of the first head
    stride: int  # rows from one head to the next

    def rows(self, positions: Iterable[int]) -> list[int]:
        """Output rows of the heads at these current positions, head after head."""
        return [self.offset + position * self.stride + row for position in positions for row in range(self.width)]

    def of(self, outputs: torch.Tensor) -> torch.Tensor:
        """From the linear map's outputs [..., rows] this role's part, [..., heads, width]."""
        if self.stride == self.width:
            return outputs.narrow(-1, self.offset, self.heads * self.width).unflatten(-1, (self.heads, self.width))
        return outputs.unflatten(-1, (self.heads, self.stride)).narrow(-1, self.offset, self.width)


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

    @property
    def size(self) -> int:
        """Members that are left."""
        return len(self.kept)

    @property
    def place(self) -> str:
        """Which part of a model it belongs to, for people."""
        return ""

    def position(self, member: int) -> int:
        """Where the member with this original id sits in today's weights."""
        return self.kept.index(member)

    def unit(self, member: int) -> tuple[Member, ...]:
        """All members that are removed together with this one."""
        first = member - member % self.group
        return tuple(Member(self.index, first + offset) for offset in range(self.group))

    def units(self) -> list[tuple[Member, ...]]:
        """The removable units that are still present."""
        return [self.unit(member) for member in self.kept[:: self.group]]

    def split(self, columns: torch.Tensor) -> torch.Tensor:
        """From the input columns of the output map [..., columns] the members, [..., members, width]."""
        return columns.unflatten(-1, (self.size, self.width))

    def columns(self, positions: Iterable[int]) -> list[int]:
        """Input columns of the output map that belong to the members at these positions."""
        return [position * self.width + column for position in positions for column in range(self.width)]

    def producers(self, positions: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
        """(module, output rows) elsewhere that produce the columns of these members; rows of one module may come in
        several pieces."""
        raise NotImplementedError


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
    per_head: tuple[str, ...] = ()  # what else depends on the head axis, for people to read
    quirk: str = ""  # name of the behaviour in quirks.py that this family needs

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
        return (self.q, self.k, self.v, *self.extras) if self.kept else ()

    def producers(self, positions: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
        groups = [position // self.group for position in positions[:: self.group]]
        for projection in self.projections:
            yield projection.module, projection.rows(positions if projection.role == "q" else groups)
