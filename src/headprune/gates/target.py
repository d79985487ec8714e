"""How many units may be left, as a constraint on what gates cost in expectation: sum of price x P(open) = budget.

Two things follow from it. All gates are shifted alike, log alpha = bias - shift, so that the constraint holds in every
step. And its Lagrange multiplier, the price of a unit of budget, asks every gate for what it takes from the others:
where the constraint is met, dL/dP(open) = -multiplier x price for a gate that is worth just what it costs. The
multiplier is what open gates did for the task in the last steps, so it has the scale that the loss has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from headprune.errors import ScheduleError
from headprune.gates.config import GateConfig
from headprune.gates.places import Place
from headprune.search.budget import check_reachable, prices
from headprune.search.stop import Stop
from headprune.units import Site

HALVINGS = 60  # of the interval that the shift is searched in
FAR = 30.0  # beyond which a sigmoid is 0 or 1


@dataclass(frozen=True)
class Target:
    """Prices of gates, what is paid whatever they do, and what may be paid in the end."""

    each: torch.Tensor  # per gate, float64
    rest: float
    dense: float
    allowed: float

    def now(self, ramp: float) -> float:
        """What may be paid when this share of the warm-up is over."""
        return self.dense + (self.allowed - self.dense) * ramp

    def shift(self, bias: torch.Tensor, offset: float, ramp: float) -> float:
        """The common shift at which the expected price, of gates that are open with sigmoid(bias + offset - shift), is
        what may be paid; 0 where it is not more than that without any."""
        own = bias.detach().double().cpu() + offset
        allowed = self.now(ramp) - self.rest

        def price(shift: float) -> float:
            return float((self.each * torch.sigmoid(own - shift)).sum())

        low, high = 0.0, float(own.max()) + FAR
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
        first = {own.start + int(order[own].argmax()) for own in protected}
        others = [gate for gate in order.argsort(descending=True, stable=True).tolist() if gate not in first]
        chosen = torch.zeros(len(order), dtype=torch.bool)
        left = self.now(ramp) - self.rest
        for gate in [*first, *others]:
            price = float(self.each[gate])
            if gate in first or price <= left * (1 + 1e-9):
                chosen[gate] = True
                left -= price
        return chosen


def target_of(model: PreTrainedModel, sites: Sequence[Site], places: Sequence[Place], config: GateConfig) -> Target:
    """The target that was asked for, or that of all units where none was, which prices them alike."""
    budget = config.budget
    known = prices(model, sites, "units" if budget is None else budget.measure, config.kinds)
    each = [
        known.of(place.site, len(ids) // place.site.group) if budget is not None else float(len(ids))
        for place in places
        for ids in place.members
    ]
    tensor = torch.tensor(each, dtype=torch.float64)
    rest = known.dense - float(tensor.sum())
    if budget is not None:
        check_reachable(budget, known, sites, _least(places))
        return Target(tensor, rest, known.dense, budget.last * known.dense)
    if config.keep is None:
        return Target(tensor, rest, known.dense, known.dense)
    allowed = Stop(config.keep).units_left(round(known.dense))
    fewest = rest + sum(len(place.members[0]) for place in places if place.site.obstacle_to_emptying)
    if fewest > allowed and allowed > 0:
        raise ScheduleError(f"{fewest:.0f} units of this model have to stay, so {allowed} cannot be kept; keep more.")
    return Target(tensor, rest, known.dense, float(allowed))


def _least(places: Sequence[Place]) -> Callable[[Site], int]:
    """Units that a site has at least, whatever its gates do."""
    gated = {place.site.index: place for place in places}

    def least(site: Site) -> int:
        place = gated.get(site.index)
        if place is None:
            return site.size // site.group
        return len(place.members[0]) // site.group if site.obstacle_to_emptying else 0

    return least
