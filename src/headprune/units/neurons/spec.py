"""What a feed-forward site is: an output map whose input columns are neurons, and where else each neuron lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headprune.units.spec import Site

LAST_NEURON = "the model does not run without any neuron here, so some must stay"


@dataclass(frozen=True)
class Strip:
    """One axis of a tensor that holds one entry of every neuron.

    A fused gate and up projection has two strips on the same axis: one block after the other, or interleaved, entry by
    entry. Nothing else lies on such an axis, so its length follows from the number of neurons.
    """

    tensor: str  # path of the parameter or buffer in the model
    dim: int
    block: int = 0
    blocks: int = 1
    interleaved: bool = False

    def indices(self, positions: Sequence[int], size: int) -> list[int]:
        """Where the neurons at these positions lie, of `size` that are there."""
        if self.interleaved:
            return [position * self.blocks + self.block for position in positions]
        return [self.block * size + position for position in positions]


@dataclass(frozen=True, kw_only=True)
class NeuronSite(Site):
    """One feed-forward layer as parameterised. A neuron is a column of its output map, and what produces it."""

    kind = "neurons"
    word = "neuron"

    ordinal: int  # its number among the feed-forward sites of the model
    strips: tuple[Strip, ...]
    maps: tuple[str, ...]  # linear maps whose outputs become the neurons
    stack: str = "encoder"
    measured: bool = False  # by experiment, and so proven, rather than read from a table
    last_stays: str = ""  # why some neuron must stay; empty where all may go

    @property
    def by_experiment(self) -> bool:
        return self.measured

    @property
    def obstacle_to_emptying(self) -> str:
        return self.obstacle or self.last_stays

    @property
    def producing_maps(self) -> Sequence[str]:
        return list(dict.fromkeys(self.maps))

    @property
    def place(self) -> str:
        return f"{self.stack} feed-forward"

    def producers(self, positions: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
        for strip in self.strips:
            path, _, name = strip.tensor.rpartition(".")
            if name == "weight" and path in self.maps:
                yield path, strip.indices(positions, self.size)

    def selections(self, positions: Sequence[int]) -> dict[tuple[str, int], list[int]]:
        """(tensor, axis) -> the indices that stay if the neurons at these positions do."""
        found: dict[tuple[str, int], list[int]] = {}
        for strip in self.strips:
            found.setdefault((strip.tensor, strip.dim), []).extend(strip.indices(positions, self.size))
        return {axis: sorted(indices) for axis, indices in found.items()}
