"""Which gate multiplies which members: one gate per unit of heads, one per group of neurons. A site that runs several
times in a forward pass (tied layers) has its gates once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from headprune.errors import GateError
from headprune.units import Kind, Member, Site


@dataclass(frozen=True)
class SiteGates:
    """The gates of one site: their slice of all gates, and the members of each."""

    site: Site
    first: int  # index among all gates
    members: tuple[tuple[int, ...], ...]  # original ids, per gate

    @property
    def gates(self) -> slice:
        return slice(self.first, self.first + len(self.members))

    def gate_indices(self) -> torch.Tensor:
        """The gate of each member by its original id, counted within the site; 0, unused, for removed members."""
        indices = torch.zeros(self.site.original, dtype=torch.long)
        for gate, ids in enumerate(self.members):
            indices[list(ids)] = gate
        return indices

    def members_of(self, gate: int) -> list[Member]:
        return [Member(self.site.index, member) for member in self.members[gate]]


def gate_layout(sites: Sequence[Site], kinds: Collection[Kind], group: int) -> list[SiteGates]:
    """The gates of all sites of these kinds whose units can be removed."""
    layout: list[SiteGates] = []
    first = 0
    for site in sites:
        if site.kind not in kinds or site.obstacle or not site.kept:
            continue
        width = site.group if site.kind == "heads" else group
        members = tuple(site.kept[at : at + width] for at in range(0, site.size, width))
        layout.append(SiteGates(site, first, members))
        first += len(members)
    if not layout:
        raise GateError(f"There are no {' or '.join(kinds)} in this model that gates could close.")
    return layout


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Put the base layers of adapters (peft) in their place for the block, so that the sites can be resolved."""
    wrapped = [
        (path, module)
        for path, module in model.named_modules()
        if type(module).__module__.startswith("peft.") and hasattr(module, "base_layer")
    ]
    for path, module in wrapped:
        _set_submodule(model, path, module.base_layer)
    try:
        yield
    finally:
        for path, module in wrapped:
            _set_submodule(model, path, module)


def _set_submodule(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
