"""Which gates the training reaches. A gate whose site never runs, such as one of a vision tower on text alone, makes no
difference to the loss, so a target would close it first; such gates stay open."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headprune.errors import GateError, ScheduleError
from headprune.search.candidates import warn_unreached
from headprune.training.gate_budget import Target
from headprune.units import Site

if TYPE_CHECKING:
    from headprune.training.learned_gates import LearnedGates


class ReachedGates:
    """The gates of sites that ran in a forward pass of the training: in `gates.reached`, bool [gates], once a step."""

    def __init__(self, gates: LearnedGates) -> None:
        self.gates = gates
        self.training = False  # whether the forward pass is one that learns
        self._since: set[int] = set()  # sites that ran since the last step
        gates.register_buffer("reached", torch.zeros(len(gates.bias), dtype=torch.bool, device=gates.bias.device))

    def see(self, site: int) -> None:
        if self.training:
            self._since.add(site)

    @torch.no_grad()
    def update(self) -> None:
        """Note the sites that ran since the last step, in any process."""
        reached = self.gates.reached
        for site_gates in self.gates.layout:
            if site_gates.site.index in self._since:
                reached[site_gates.gates] = True
        ran = bool(self._since)
        self._since.clear()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            anywhere = reached.to(torch.uint8)
            torch.distributed.all_reduce(anywhere, torch.distributed.ReduceOp.MAX)
            reached.copy_(anywhere)
        if self.gates.last_inputs is not None and self.training and not ran and not bool(reached.any()):
            raise GateError(
                "No training sample reaches a unit that has a gate, so the gates cannot learn; train on data that does."
            )

    def unreached(self) -> torch.Tensor:
        """Bool [gates]: those of sites that no sample of the training has reached; none before its first step."""
        reached = self.gates.reached
        return ~reached if bool(reached.any()) else torch.zeros_like(reached)

    def sites(self) -> list[Site]:
        """The sites that no sample of the training has reached."""
        unreached = self.unreached().tolist()
        return [site_gates.site for site_gates in self.gates.layout if unreached[site_gates.first]]

    def target(self) -> Target:
        """The target of the gates that learn."""
        unreached = self.unreached().cpu()
        return self.gates.target.with_open(unreached) if bool(unreached.any()) else self.gates.target

    def check_removal(self) -> None:
        """Name the sites that were not reached, and refuse a target that cannot be met without them."""
        sites = self.sites()
        if sites and self.gates.config.l0 is None:
            target = self.target()
            protected = [part.gates for part in self.gates.layout if part.site.obstacle_to_emptying]
            floor = target.rest + sum(float(target.each[gates].min()) for gates in protected)
            if floor > target.allowed * (1 + 1e-9):
                raise ScheduleError(
                    f"The gates should keep {target.allowed / target.dense:.3g} of the model, and without the units of "
                    f"{sites[0].path}{f' and {len(sites) - 1} more' if len(sites) > 1 else ''}, which no training "
                    f"sample reaches, {floor / target.dense:.3g} is the least; keep more, or train on data that "
                    "reaches them."
                )
        warn_unreached(sites, "training", "train on data that does")
