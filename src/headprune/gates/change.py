"""How much the output of a layer changes without each of its units, measured while a model trains."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headprune.gates.places import Place
from headprune.hooks.attach import attach_hook
from headprune.tasks import task_of
from headprune.units.linear import is_transposed

if TYPE_CHECKING:
    from headprune.gates.learned import LearnedGates

MEMORY = 0.9  # share of what was known that stays when a step has seen its batches


class Changes:
    """Per gate |W_u x_u|^2, relative to the whole output |W x|^2, over the real tokens of all batches of a step, as a
    running mean over steps."""

    def __init__(self, gates: LearnedGates) -> None:
        self.gates = gates
        self.task = task_of(gates.model)
        sums = torch.zeros(2, len(gates.bias), device=gates.bias.device)
        gates.register_buffer("sums", sums, persistent=False)  # which goes where the model goes

    def attach(self) -> list[Any]:
        model = self.gates.model
        return [
            # Before the gate's own hook: a closed unit has a change, too.
            attach_hook(model.get_submodule(place.site.o), functools.partial(self._see, place), before=True, first=True)
            for place in self.gates.places
        ]

    @torch.no_grad()
    def _see(self, place: Place, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        gates, site = self.gates, place.site
        if not gates.training:
            return
        columns = args[0].detach()
        mask = self.task.site_tokens(site, gates.batch, columns.shape[-2]) if columns.dim() == 3 else None
        rows = columns.reshape(-1, columns.shape[-1]) if mask is None else columns[mask.to(columns.device)]
        rows = rows.float()
        weight = _weight(module).float()
        whole = (rows @ weight.T).square().sum()
        changes = []
        for ids in place.members:
            own = site.columns(site.position(member) for member in ids)
            part = weight[:, own]
            # |W_u x_u|^2 by the small matrix W_u^T W_u, as often narrower than the output is wide.
            seen = rows[:, own]
            changes.append(((seen @ (part.T @ part)) * seen).sum())
        gates.sums[0, place.gates] += torch.stack(changes)
        gates.sums[1, place.gates] += whole

    @torch.no_grad()
    def take(self) -> None:
        """Bring `gates.costs` up to date with what all processes saw since the last time."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.gates.sums)
        parts, whole = self.gates.sums
        found = parts / whole.clamp_min(torch.finfo(whole.dtype).tiny)
        known = self.gates.costs
        mixed = torch.where(known == 0, found, MEMORY * known + (1 - MEMORY) * found)
        known.copy_(torch.where(whole > 0, mixed, known))
        self.gates.sums.zero_()


def _weight(module: Any) -> torch.Tensor:
    """[out x in], with what an adapter adds."""
    plain = getattr(module, "base_layer", module)
    weight = plain.weight
    for adapter in getattr(module, "active_adapters", ()) if plain is not module else ():
        weight = weight + module.get_delta_weight(adapter)
    return weight.T if is_transposed(plain) else weight
