"""Budgets: what may be left of a model in parameters, FLOPs, bytes, measured time or units, and the prices of its
sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from headprune.config.groups import Measure
from headprune.errors import ScheduleError
from headprune.measure.costs import flops, total_parameters, unit_bytes, unit_costs, unit_parameters
from headprune.measure.trajectory import Step
from headprune.search.config import PruneConfig
from headprune.units import Kind, Site
from headprune.units.resolve import left_whole

UNBOUNDED_SHARE = 0.1  # share of the FLOPs at which a run without a budget ends


@dataclass(frozen=True)
class Budget:
    """Shares of the dense model to stop at, largest first, in one measure."""

    measure: Measure
    shares: tuple[float, ...]

    @property
    def last(self) -> float:
        return self.shares[-1]

    def rule(self) -> str:
        """The last point, as the option that sets it."""
        names = {"latency": "speedup", "units": "keep"}
        name = names.get(self.measure, f"keep_{self.measure}")
        return f"{name} {1 / self.last if self.measure == 'latency' else self.last:.4g}"

    def label(self, share: float) -> str:
        """A point in messages and in names of folders."""
        return f"speedup-{1 / share:.4g}" if self.measure == "latency" else f"{self.measure}-{share:.4g}"


def points(value: Any, name: str) -> tuple[float, ...]:
    """Points from a number, several numbers or a text such as "0.8,0.5", in the order in which a run reaches them."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, (tuple, list)) else (value,)
    try:
        numbers = [float(part) for part in parts]
    except (TypeError, ValueError):
        raise ScheduleError(
            f"{name} takes a number such as {_example(name)}, or several with commas, not {value!r}."
        ) from None
    valid = (
        (1 < number < math.inf for number in numbers) if name == "speedup" else (0 < number < 1 for number in numbers)
    )
    if not numbers or not all(valid):
        numbers_text = ",".join(f"{number:g}" for number in numbers)
        between = "above 1" if name == "speedup" else "between 0 and 1"
        raise ScheduleError(f"{name} must be {between}, such as {_example(name)}, but it is {numbers_text}.")
    return tuple(sorted(set(numbers), reverse=name != "speedup"))


def _example(name: str) -> str:
    return "2.0" if name == "speedup" else "0.5"


def budget_of(config: PruneConfig, sites: Sequence[Site]) -> Budget:
    """The budget of a run, whichever option sets it."""
    if config.budget is not None:
        return config.budget
    if config.keep is not None:
        total = sum(site.size for site in sites if site.kind in config.units)
        return Budget("units", (config.stop.units_left(total) / max(total, 1),))
    return Budget("flops", (UNBOUNDED_SHARE,))


def left_after(step: Step, measure: Measure) -> int:
    """What is left of a model after a step in this measure; for time, in FLOPs."""
    if measure == "units":
        return step.left
    return step.parameters if measure in ("parameters", "memory") else step.flops


def intermediate_shares(points: Sequence[float], rounds: int) -> list[float]:
    """The shares after each round, with all points among them: down to the last point in this many steps of about the
    same ratio, and to each of the others in proportionally many."""
    last = points[-1]
    if last <= 0:
        return [1 - number / rounds for number in range(1, rounds)] + [0.0]
    shares = []
    before = 1.0
    for point in points:
        steps = max(1, round(rounds * math.log(point / before) / math.log(last)))
        shares += [before * (point / before) ** (number / steps) for number in range(1, steps)] + [point]
        before = point
    return shares


@dataclass(frozen=True)
class Prices:
    """The price of a model: a part that cannot be removed, and for each site a price of every number of units."""

    dense: float
    rest: float
    of: Callable[[Site, int], float]  # units of a site -> price

    def total(self, counts: Mapping[int, int], sites: Sequence[Site]) -> float:
        return self.rest + sum(self.of(site, counts.get(site.index, units(site))) for site in sites)


def units(site: Site) -> int:
    """Units that are left at a site."""
    return site.size // site.group


def prices(
    model: PreTrainedModel, sites: Sequence[Site], measure: Measure, kinds: Collection[Kind] = ("heads", "neurons")
) -> Prices:
    """The price of the dense model and of the units of its sites, in every measure but time. In the measure of units
    only these `kinds` count."""
    if measure == "parameters":
        each, whole = unit_parameters(model, sites), float(total_parameters(model))
    elif measure == "memory":
        each = unit_bytes(model, sites)
        whole = float(sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()))
    elif measure == "flops":
        each, whole = unit_costs(model, sites), float(flops(model, sites).total)
    else:
        each = [site.group * (site.kind in kinds) for site in sites]
        whole = float(sum(site.size for site in sites if site.kind in kinds))
    by_site = {site.index: float(price) for site, price in zip(sites, each, strict=True)}
    rest = whole - sum(by_site[site.index] * units(site) for site in sites)
    return Prices(whole, rest, lambda site, count: by_site[site.index] * count)


def least_share(prices_of_sites: Prices, sites: Sequence[Site], least: Callable[[Site], int]) -> float:
    """The share of the dense model's price with as few units as possible."""
    return (prices_of_sites.rest + sum(prices_of_sites.of(site, least(site)) for site in sites)) / prices_of_sites.dense


def check_reachable(
    budget: Budget, prices_of_sites: Prices, sites: Sequence[Site], least: Callable[[Site], int]
) -> None:
    """Refuse a budget that is not met with as few units as possible."""
    floor = least_share(prices_of_sites, sites, least)
    if floor > budget.last:
        what = "the vocabulary" if budget.measure in ("parameters", "memory") else "the rest of the model"
        fast = budget.measure == "latency"
        target = f"a speed-up of {1 / budget.last:.3g}" if fast else f"{budget.last:.3g} of the dense model"
        most = f"a speed-up of {1 / floor:.3g}" if fast else f"{math.ceil(floor * 1000) / 1000:.3g}"
        whole = left_whole([(site.path, site.obstacle) for site in sites if site.kept and site.obstacle])
        stays = f" (left whole: {'; '.join(whole)})" if whole else ""
        raise ScheduleError(
            f"The budget is {target}, and with nothing but {what} left it would still be {most}{stays}; set a larger "
            "budget, or prune more kinds of units (--units heads,neurons)."
        )
