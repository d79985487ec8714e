"""Gates on what the members of a site give: as a context manager, or as a module that stays and may train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from headprune.errors import GateError
from headprune.hooks.attach import HookedSite
from headprune.hooks.gates import InstalledGates, check_gates, gate_sites
from headprune.hooks.model_lock import exclusive_method, locked
from headprune.hooks.offload import input_device
from headprune.units import Site, resolve, widest


@contextmanager
def gated(model: nn.Module, gates: torch.Tensor, *, sites: Sequence[Site] | None = None) -> Iterator[None]:
    """Multiply the output of every head, before the output projection, by its gate.

    `gates` is [sites x heads], or [batch x sites x heads] for a row of gates per sample, in original head ids; the
    positions of removed heads are not looked at. A gate of 1 leaves the output as it is, bit for bit. With the
    `sites` of `all_sites(model)` the table has rows for neurons, too. Calls of headprune on the model in other threads
    wait for the end of the block.
    """
    with locked(model), gate_sites(model, resolve(model) if sites is None else sites, gates):
        yield


class Gates(InstalledGates):
    """Gates that stay on a model until they are taken off, one value per member of every site.

        gates = headprune.Gates(model, trainable=True)
        gates.attach()
        optimizer = torch.optim.AdamW([*model.parameters(), *gates.parameters()])
        ...
        gates.detach()

    The values are parameters if `trainable`, buffers otherwise; they start at 1, or at `values` [sites x members].
    Those of neurons come with the `sites` of `all_sites(model)`. The model is not a part of this module, so its
    parameters are its own. Gates that learn to close are `LearnedGates`.
    """

    values: torch.Tensor

    @exclusive_method
    def __init__(
        self,
        model: nn.Module,
        values: torch.Tensor | None = None,
        *,
        trainable: bool = False,
        sites: Sequence[Site] | None = None,
    ) -> None:
        super().__init__(model, resolve(model) if sites is None else sites)
        parameter = next(model.parameters())
        start = torch.ones(len(self.sites), widest(self.sites)) if values is None else values.detach().clone()
        check_gates(start, self.sites)
        if start.dim() != 2:
            raise GateError("Gates that stay are [sites x heads], the same for every sample.")
        start = start.to(input_device(model), parameter.dtype)
        if trainable:
            self.values = nn.Parameter(start)
        else:
            self.register_buffer("values", start)

    def forward(self, site: HookedSite) -> torch.Tensor:
        """What multiplies the members of this site, [members]; a subclass may draw them."""
        return self.values[site.index]
