"""What a site is: one attention module as parameterised, described by values only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

from headprune.units.members import Head

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


@dataclass(frozen=True)
class AttentionSite:
    """One attention module as parameterised. Head ids are original ones; positions are those in today's weights."""

    index: int
    path: str
    attention: Literal["self", "cross"]
    stack: Literal["encoder", "decoder", "vision", "text"]
    family: str
    q: Projection
    k: Projection
    v: Projection
    o: str  # path of the output projection
    storage: Literal["separate", "fused", "interleaved"]
    conv1d: bool
    head_dim: int
    group: int  # query heads that share one KV head
    kept: tuple[int, ...]  # original ids of the heads still present, in the order of the weights
    original_heads: int
    applications: int  # how often one forward pass runs this site
    extras: tuple[Projection, ...] = ()  # further projections with a head axis (DeBERTa's positions)
    per_head: tuple[str, ...] = ()  # what else depends on the head axis, for people to read
    obstacle: str = ""  # why exact removal is impossible here; empty where it is possible
    quirk: str = ""  # name of the behaviour in quirks.py that this family needs

    @property
    def kind(self) -> str:
        return f"{self.stack} {self.attention}"

    @property
    def heads(self) -> int:
        return len(self.kept)

    @property
    def kv_heads(self) -> int:
        return self.heads // self.group

    @property
    def projections(self) -> tuple[Projection, ...]:
        return (self.q, self.k, self.v, *self.extras) if self.kept else ()

    def position(self, head: int) -> int:
        """Where the head with this original id sits in today's weights."""
        return self.kept.index(head)

    def unit(self, head: int) -> tuple[Head, ...]:
        """All heads that are removed together with this one: itself, or its KV group."""
        first = head - head % self.group
        return tuple(Head(self.index, first + offset) for offset in range(self.group))

    def units(self) -> list[tuple[Head, ...]]:
        """The removable units that are still present."""
        return [self.unit(head) for head in self.kept[:: self.group]]
