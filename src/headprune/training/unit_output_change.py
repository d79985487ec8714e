"""How much the output of a layer changes without each of its units, measured while a model trains."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headprune.hooks.attach import attach_hook
from headprune.tasks import task_of
from headprune.training.gate_layout import SiteGates
from headprune.units.linear import is_transposed

if TYPE_CHECKING:
    from headprune.training.learned_gates import LearnedGates

DECAY = 0.9  # per step, of the running mean


class OutputChanges:
    """Per gate |W_u x_u|^2, relative to the whole output |W x|^2, over the real tokens of all batches of a step, as a
    running mean over steps."""

    def __init__(self, gates: LearnedGates) -> None:
        self.gates = gates
        self.task = task_of(gates.model)
        sums = torch.zeros(2, len(gates.bias), device=gates.bias.device)
        gates.register_buffer("sums", sums, persistent=False)  # moves with the model

    def attach(self) -> list[Any]:
        model = self.gates.model
        return [
            # Before the gate's own hook: a closed unit has a change, too.
            attach_hook(
                model.get_submodule(part.site.o), functools.partial(self._observe, part), before=True, first=True
            )
            for part in self.gates.layout
        ]

    @torch.no_grad()
    def _observe(self, site_gates: SiteGates, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        gates, site = self.gates, site_gates.site
        if not gates.training:
            return
        inputs = args[0].detach()
        mask = self.task.site_tokens(site, gates.batch, inputs.shape[-2]) if inputs.dim() == 3 else None
        tokens = inputs.reshape(-1, inputs.shape[-1]) if mask is None else inputs[mask.to(inputs.device)]
        tokens = tokens.float()
        weight = _weight(module).float()
        total = (tokens @ weight.T).square().sum()
        changes = []
        for ids in site_gates.members:
            columns = site.columns(site.position(member) for member in ids)
            # |W_u x_u|^2 by the small matrix W_u^T W_u: a unit is narrower than the output.
            unit_weight, unit_inputs = weight[:, columns], tokens[:, columns]
            changes.append(((unit_inputs @ (unit_weight.T @ unit_weight)) * unit_inputs).sum())
        gates.sums[0, site_gates.gates] += torch.stack(changes)
        gates.sums[1, site_gates.gates] += total

    @torch.no_grad()
    def update(self) -> None:
        """Update the running mean `gates.costs` by the batches of all processes since the last step."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.gates.sums)
        changes, total = self.gates.sums
        step = changes / total.clamp_min(torch.finfo(total.dtype).tiny)
        mean = self.gates.costs
        mixed = torch.where(mean == 0, step, DECAY * mean + (1 - DECAY) * step)
        mean.copy_(torch.where(total > 0, mixed, mean))
        self.gates.sums.zero_()


def _weight(module: Any) -> torch.Tensor:
    """[out x in], with the update of active adapters."""
    plain = getattr(module, "base_layer", module)
    weight = plain.weight
    for adapter in getattr(module, "active_adapters", ()) if plain is not module else ():
        weight = weight + module.get_delta_weight(adapter)
    return weight.T if is_transposed(plain) else weight
