"""Chooses the units to remove so that a model meets a budget for which all sites compete.

A head costs as much as hundreds of neurons, so the error per price decides.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from headprune.errors import ScheduleError
from headprune.search.allocate import Curve, allocate, groups
from headprune.search.budget import Prices, units
from headprune.search.config import PruneConfig
from headprune.units import Kind, Member, Site


def choose(
    scores: torch.Tensor,
    sites: Sequence[Site],
    prices_of_sites: Prices,
    target: float,
    *,
    kinds: Collection[Kind],
    round_to: int = 8,
    min_per_site: int = 0,
    widths: str = "global",
) -> list[Member]:
    """The members to remove so that the price of the model is at most `target`, least important first at every site. A
    site without scores stays whole."""
    orders = {
        site.index: ranked(scores, site)
        for site in sites
        if competes(site, kinds) and not scores[site.index, list(site.kept)].isnan().any()
    }
    fixed = prices_of_sites.rest + sum(
        prices_of_sites.of(site, units(site)) for site in sites if site.index not in orders
    )
    curves = {
        index: _curve(order, sites[index], prices_of_sites, round_to, least_left(sites[index], min_per_site))
        for index, order in orders.items()
    }
    if widths == "threshold":
        keep = _threshold(curves, {i: [value for value, _ in order] for i, order in orders.items()}, target - fixed)
    else:
        keep = _uniform(curves, target - fixed) if widths == "uniform" else allocate(curves, target - fixed)
    if keep is None:
        raise ScheduleError(
            "The budget cannot be met with the units that every site has to keep; set a larger budget, or lower "
            "--min-per-site."
        )
    leaving: list[Member] = []
    for index, order in orders.items():
        for _, unit in order[: len(order) - keep[index]]:
            leaving += unit
    return leaving


def competes(site: Site, kinds: Collection[Kind]) -> bool:
    return bool(site.kept) and site.kind in kinds and not site.obstacle


def least_left(site: Site, min_per_site: int) -> int:
    """Units that a site has to keep."""
    least = min(max(min_per_site, int(bool(site.obstacle_to_emptying))), site.size)
    return -(-least // site.group)


def least_units(site: Site, config: PruneConfig) -> int:
    return least_left(site, config.min_per_site) if competes(site, config.units) else units(site)


def ranked(scores: torch.Tensor, site: Site) -> list[tuple[float, tuple[Member, ...]]]:
    """The units of a site, least important first; of equal ones in the order of their ids."""
    values = scores[site.index, list(site.kept)].double().unflatten(0, (-1, site.group)).mean(1).tolist()
    return sorted(zip(values, site.units(), strict=True))


def _curve(order: Sequence[tuple[float, Any]], site: Site, prices_of_sites: Prices, round_to: int, least: int) -> Curve:
    """The error at every number of units that a site may keep: the sum of the scores of the removed units."""
    size = len(order)
    counts = groups(size, round_to if site.kind == "neurons" else 1, least)
    errors = [0.0]
    for value, _ in order:
        errors.append(errors[-1] + max(value, 0.0))
    return Curve(
        counts,
        tuple(errors[size - count] for count in counts),
        tuple(prices_of_sites.of(site, count) for count in counts),
    )


def _uniform(curves: Mapping[int, Curve], budget: float) -> dict[int, int] | None:
    """The same share of units at every site: the largest that the budget allows."""
    best = None
    for step in range(1001):
        share = step / 1000
        keep = {
            index: max((count for count in curve.counts if count <= share * curve.counts[-1]), default=curve.counts[0])
            for index, curve in curves.items()
        }
        price = sum(curve.prices[curve.counts.index(keep[index])] for index, curve in curves.items())
        if price > budget:
            break
        best = keep
    return best


def _threshold(
    curves: Mapping[int, Curve], scores: Mapping[int, Sequence[float]], budget: float
) -> dict[int, int] | None:
    """Units of all sites in one order by their scores, whatever they cost: the lowest threshold that the budget allows.
    `scores` of a site are in rising order; where a width is not allowed, the next smaller one is taken."""
    levels = sorted({score for values in scores.values() for score in values})
    low, high = 0, len(levels)  # levels below a threshold; units with lower scores are removed
    best = None
    while low <= high:
        middle = (low + high) // 2
        least = levels[middle] if middle < len(levels) else math.inf
        keep = {}
        for index, curve in curves.items():
            above = len(scores[index]) - bisect.bisect_left(scores[index], least)
            keep[index] = max((count for count in curve.counts if count <= above), default=curve.counts[0])
        if sum(curve.prices[curve.counts.index(keep[index])] for index, curve in curves.items()) <= budget:
            best, high = keep, middle - 1
        else:
            low = middle + 1
    return best
