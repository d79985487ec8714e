"""How many units may be left, as a constraint on the expected price of gates: sum of price x P(open) = budget.

Two things follow from it. All gates are shifted alike, log alpha = bias - shift, so that the constraint holds in every
step. And its Lagrange multiplier, the price of a unit of budget, charges every gate for what it takes from the others:
where the constraint is met, dL/dP(open) = -multiplier x price for a gate that is worth just what it costs. The
multiplier is what open gates did for the task in the last steps, so it has the scale that the loss has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from headprune.errors import ScheduleError
from headprune.search.budget import check_reachable, prices
from headprune.search.stop import Stop
from headprune.training.gate_config import GateConfig
from headprune.training.gate_layout import SiteGates
from headprune.units import Site

HALVINGS = 60  # of the interval that the shift is searched in
FAR = 30.0  # beyond which a sigmoid is 0 or 1


@dataclass(frozen=True)
class Target:
    """Prices of gates, and what may be paid at the end of the warm-up."""

    each: torch.Tensor  # price of each gate, float64
    rest: float  # of all that has no gate
    dense: float  # of the dense model
    allowed: float  # in the end

    def with_open(self, stays_open: torch.Tensor) -> Target:
        """The target of the other gates, where these [gates] stay open: what they cost is paid whatever is learned."""
        each = self.each.masked_fill(stays_open, 0.0)
        return replace(self, each=each, rest=self.rest + float(self.each[stays_open].sum()))

    def now(self, ramp: float) -> float:
        """What may be paid when this share of the warm-up is over."""
        return self.dense + (self.allowed - self.dense) * ramp

    def shift(self, bias: torch.Tensor, offset: float, ramp: float) -> float:
        """The common shift at which the expected price, of gates that are open with sigmoid(bias + offset - shift), is
        what may be paid; 0 where it is not more than that without any."""
        logits = bias.detach().double().cpu() + offset
        allowed = self.now(ramp) - self.rest

        def price(shift: float) -> float:
            return float((self.each * torch.sigmoid(logits - shift)).sum())

        low, high = 0.0, float(logits.max()) + FAR
        if price(low) <= allowed:
            return 0.0
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if price(middle) > allowed else (low, middle)
        return high

    def slopes(self, probability: torch.Tensor) -> torch.Tensor:
        """By how much the expected price changes with each bias."""
        return self.each.to(probability) * probability * (1 - probability)

    def affordable(self, worth: torch.Tensor, protected: Sequence[slice], ramp: float) -> torch.Tensor:
        """Bool [gates]: the gates of most worth that can be paid for; a protected site keeps its best one."""
        order = worth.double().cpu()
        first = {gates.start + int(order[gates].argmax()) for gates in protected}
        others = [gate for gate in order.argsort(descending=True, stable=True).tolist() if gate not in first]
        chosen = torch.zeros(len(order), dtype=torch.bool)
        left = self.now(ramp) - self.rest
        for gate in [*first, *others]:
            price = float(self.each[gate])
            if gate in first or price <= left * (1 + 1e-9):
                chosen[gate] = True
                left -= price
        return chosen


def gate_target(
    model: PreTrainedModel, sites: Sequence[Site], layout: Sequence[SiteGates], config: GateConfig
) -> Target:
    """The target of a config; without one, all units at equal prices."""
    budget = config.budget
    price_list = prices(model, sites, "units" if budget is None else budget.measure, config.kinds)
    each = [
        price_list.of(part.site, len(ids) // part.site.group) if budget is not None else float(len(ids))
        for part in layout
        for ids in part.members
    ]
    tensor = torch.tensor(each, dtype=torch.float64)
    rest = price_list.dense - float(tensor.sum())
    if budget is not None:
        check_reachable(budget, price_list, sites, _least(layout))
        return Target(tensor, rest, price_list.dense, budget.last * price_list.dense)
    if config.keep is None:
        return Target(tensor, rest, price_list.dense, price_list.dense)
    allowed = Stop(config.keep).units_left(round(price_list.dense))
    fewest = rest + sum(len(part.members[0]) for part in layout if part.site.obstacle_to_emptying)
    if fewest > allowed and allowed > 0:
        raise ScheduleError(f"{fewest:.0f} units of this model have to stay, so {allowed} cannot be kept; keep more.")
    return Target(tensor, rest, price_list.dense, float(allowed))


def _least(layout: Sequence[SiteGates]) -> Callable[[Site], int]:
    """Units that a site has at least, whatever its gates do."""
    gated = {part.site.index: part for part in layout}

    def least(site: Site) -> int:
        site_gates = gated.get(site.index)
        if site_gates is None:
            return site.size // site.group
        return len(site_gates.members[0]) // site.group if site.obstacle_to_emptying else 0

    return least
