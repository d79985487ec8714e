"""Which gate stands before which members: one per unit of heads, one per group of neurons; a tied site has its gates
once, however often it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from headprune.errors import GateError
from headprune.units import Kind, Member, Site


@dataclass(frozen=True)
class Place:
    """The gates of one site: where they lie among all gates, and whose they are."""

    site: Site
    first: int
    members: tuple[tuple[int, ...], ...]  # original ids behind each gate

    @property
    def gates(self) -> slice:
        return slice(self.first, self.first + len(self.members))

    def owners(self) -> torch.Tensor:
        """The gate of each member by its original id; 0 for those that have gone, which no one looks at."""
        found = torch.zeros(self.site.original, dtype=torch.long)
        for number, ids in enumerate(self.members):
            found[list(ids)] = number
        return found

    def behind(self, number: int) -> list[Member]:
        """The members of one of its gates."""
        return [Member(self.site.index, member) for member in self.members[number]]


def places_of(sites: Sequence[Site], kinds: Collection[Kind], group: int) -> list[Place]:
    """The gates of all sites of these kinds whose units can go."""
    found: list[Place] = []
    first = 0
    for site in sites:
        if site.kind not in kinds or site.obstacle or not site.kept:
            continue
        width = site.group if site.kind == "heads" else group
        members = tuple(site.kept[at : at + width] for at in range(0, site.size, width))
        found.append(Place(site, first, members))
        first += len(members)
    if not found:
        raise GateError(f"There are no {' or '.join(kinds)} in this model that gates could close.")
    return found


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model with the plain maps that adapters (peft) are built around, for reading its sites."""
    wrapped = [
        (path, module)
        for path, module in model.named_modules()
        if type(module).__module__.startswith("peft.") and hasattr(module, "base_layer")
    ]
    for path, module in wrapped:
        _put(model, path, module.base_layer)
    try:
        yield
    finally:
        for path, module in wrapped:
            _put(model, path, module)


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
