"""How many units every site keeps: the least error in all for what a budget allows.

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
    """What one site may keep: numbers of units in rising order, the error and the price of each."""

    counts: tuple[int, ...]
    errors: tuple[float, ...]
    prices: tuple[float, ...]


def allocate(curves: Mapping[int, Curve], budget: float) -> dict[int, int] | None:
    """site -> units to keep, so that prices add up to at most the budget; None where the least does not."""
    errors = {site: numpy.array(curve.errors) for site, curve in curves.items()}
    prices = {site: numpy.array(curve.prices) for site, curve in curves.items()}
    least = {site: int(own.argmin()) for site, own in prices.items()}
    if _price(prices, least) > budget:
        return None
    low, high = 0.0, _highest_rate(errors, prices)
    chosen = _at(errors, prices, low)
    if _price(prices, chosen) > budget:
        chosen = least
        for _ in range(100):
            rate = (low + high) / 2 if low == 0 or high / low < 4 else (low * high) ** 0.5
            tried = _at(errors, prices, rate)
            if _price(prices, tried) <= budget:
                high, chosen = rate, tried
            else:
                low = rate
            if high - low <= 1e-12 * high:
                break
    _spend(errors, prices, chosen, budget)
    return {site: curves[site].counts[place] for site, place in chosen.items()}


def _at(errors: Mapping[int, numpy.ndarray], prices: Mapping[int, numpy.ndarray], rate: float) -> dict[int, int]:
    """What each site chooses when a unit of price costs this much error; of equal ones the cheapest."""
    return {site: int((own + rate * prices[site]).argmin()) for site, own in errors.items()}


def _price(prices: Mapping[int, numpy.ndarray], chosen: Mapping[int, int]) -> float:
    return float(sum(prices[site][place] for site, place in chosen.items()))


def _highest_rate(errors: Mapping[int, numpy.ndarray], prices: Mapping[int, numpy.ndarray]) -> float:
    """A rate at which every site chooses what is cheapest."""
    span = max(float(own.max() - own.min()) for own in errors.values())
    steps = [step for own in prices.values() for step in numpy.diff(numpy.unique(own)).tolist() if step > 0]
    return 2 * span / min(steps) + 1e-300 if steps and span > 0 else 1.0


def _spend(
    errors: Mapping[int, numpy.ndarray], prices: Mapping[int, numpy.ndarray], chosen: dict[int, int], budget: float
) -> None:
    """Use up what is left, each time for the step that lowers the error most for its price."""
    left = budget - _price(prices, chosen)
    while True:
        best: tuple[float, int, int] | None = None
        for site, place in chosen.items():
            gain = errors[site][place] - errors[site][place + 1 :]
            extra = prices[site][place + 1 :] - prices[site][place]
            fits = (extra <= left) & (gain > 0)
            if fits.any():
                worth = numpy.where(fits, gain / numpy.maximum(extra, 1e-300), -1.0)
                step = int(worth.argmax())
                if best is None or worth[step] > best[0]:
                    best = float(worth[step]), site, place + 1 + step
        if best is None:
            return
        _, site, place = best
        left -= float(prices[site][place] - prices[site][chosen[site]])
        chosen[site] = place


def groups(size: int, width: int, least: int) -> tuple[int, ...]:
    """Numbers that may be kept of `size`: multiples of a width, and all of them, not fewer than `least`."""
    return tuple(count for count in sorted({*range(0, size, width), size}) if count >= least)
