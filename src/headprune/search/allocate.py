"""How many units every site keeps: the smallest total error within a budget.

Each site has a curve, the error at every number of units that it may keep, and a price for each of these numbers. The
sites share one budget and nothing else, so a common exchange rate between error and price (a Lagrange multiplier)
decides for each of them; what is left of the budget then goes where it does most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy


@dataclass(frozen=True)
class Curve:
    """The options of one site: numbers of units to keep in rising order, with the error and the price of each."""

    counts: tuple[int, ...]
    errors: tuple[float, ...]
    prices: tuple[float, ...]


def allocate(curves: Mapping[int, Curve], budget: float) -> dict[int, int] | None:
    """site -> units to keep, so that prices add up to at most the budget; None where even the cheapest exceed it."""
    errors = {site: numpy.array(curve.errors) for site, curve in curves.items()}
    prices = {site: numpy.array(curve.prices) for site, curve in curves.items()}
    least = {site: int(values.argmin()) for site, values in prices.items()}
    if _price(prices, least) > budget:
        return None
    low, high = 0.0, _highest_rate(errors, prices)
    chosen = _at(errors, prices, low)
    if _price(prices, chosen) > budget:
        chosen = least
        for _ in range(100):
            rate = (low + high) / 2 if low == 0 or high / low < 4 else (low * high) ** 0.5
            trial = _at(errors, prices, rate)
            if _price(prices, trial) <= budget:
                high, chosen = rate, trial
            else:
                low = rate
            if high - low <= 1e-12 * high:
                break
    _spend(errors, prices, chosen, budget)
    return {site: curves[site].counts[level] for site, level in chosen.items()}


def _at(errors: Mapping[int, numpy.ndarray], prices: Mapping[int, numpy.ndarray], rate: float) -> dict[int, int]:
    """The choice of each site when a unit of price costs this much error; of equal ones the cheapest."""
    return {site: int((values + rate * prices[site]).argmin()) for site, values in errors.items()}


def _price(prices: Mapping[int, numpy.ndarray], chosen: Mapping[int, int]) -> float:
    return float(sum(prices[site][level] for site, level in chosen.items()))


def _highest_rate(errors: Mapping[int, numpy.ndarray], prices: Mapping[int, numpy.ndarray]) -> float:
    """A rate at which every site chooses the cheapest option."""
    span = max(float(values.max() - values.min()) for values in errors.values())
    steps = [step for values in prices.values() for step in numpy.diff(numpy.unique(values)).tolist() if step > 0]
    return 2 * span / min(steps) + 1e-300 if steps and span > 0 else 1.0


def _spend(
    errors: Mapping[int, numpy.ndarray], prices: Mapping[int, numpy.ndarray], chosen: dict[int, int], budget: float
) -> None:
    """Spend the rest of the budget, each time on the step that lowers the error most for its price."""
    left = budget - _price(prices, chosen)
    while True:
        best: tuple[float, int, int] | None = None
        for site, level in chosen.items():
            gain = errors[site][level] - errors[site][level + 1 :]
            extra = prices[site][level + 1 :] - prices[site][level]
            fits = (extra <= left) & (gain > 0)
            if fits.any():
                worth = numpy.where(fits, gain / numpy.maximum(extra, 1e-300), -1.0)
                step = int(worth.argmax())
                if best is None or worth[step] > best[0]:
                    best = float(worth[step]), site, level + 1 + step
        if best is None:
            return
        _, site, level = best
        left -= float(prices[site][level] - prices[site][chosen[site]])
        chosen[site] = level


def groups(size: int, width: int, least: int) -> tuple[int, ...]:
    """Numbers that may be kept of `size`: multiples of a width, and all of them, not fewer than `least`."""
    return tuple(count for count in sorted({*range(0, size, width), size}) if count >= least)
