"""Chooses the units of the next step from scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headprune.units import Member, Site


@dataclass(frozen=True)
class StepRule:
    """Removes `every` units per step, the least important, while each site keeps `min_per_site` members."""

    every: int = 1
    min_per_site: int = 0

    def choose(self, scores: torch.Tensor, sites: Sequence[Site], most: int | None = None) -> list[Member]:
        """The members of the next units to remove, least important first; empty if none can be removed.

        A unit's score is the mean of its members'. Equal scores are in order of site and member. `most` limits the
        number of members, so that a budget is not overshot; a first unit that is larger is removed anyway.
        """
        left = {site.index: site.size for site in sites}
        least = {site.index: max(self.min_per_site, bool(site.obstacle_to_emptying)) for site in sites}
        chosen: list[Member] = []
        units = 0
        for _, unit in ranked_units(scores, sites):
            site = unit[0].site
            if units == self.every or (most is not None and chosen and len(chosen) + len(unit) > most):
                break
            if left[site] - len(unit) >= least[site]:
                left[site] -= len(unit)
                chosen += unit
                units += 1
        return chosen


def ranked_units(scores: torch.Tensor, sites: Sequence[Site]) -> list[tuple[float, tuple[Member, ...]]]:
    """The removable units with their scores, least important first; those without a score stay."""
    values = scores.double().tolist()  # in one call: thousands of scalar tensors take seconds
    ranked = (
        (sum(values[member.site][member.index] for member in unit) / len(unit), unit)
        for site in sites
        if not site.obstacle
        for unit in site.units()
    )
    return sorted((value, unit) for value, unit in ranked if not math.isnan(value))
