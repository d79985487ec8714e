"""Refuses budgets that cannot be met: by what every site has to keep, and by sites that stay whole."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from headprune.search.budget import budget_of, check_reachable, prices, units
from headprune.search.config import PruneConfig
from headprune.search.selection import competes, least_units
from headprune.units import Site


def refuse_unreachable(model: PreTrainedModel, config: PruneConfig, sites: Sequence[Site]) -> None:
    """Refuse a budget that cannot be met with these sites; one of time is known only by measuring."""
    if config.schedule != "rounds":
        _refuse_keep(model, config, sites)
    elif config.budget is not None or config.keep is not None:
        budget = budget_of(config, sites)
        if budget.measure != "latency":
            dense_prices = prices(model, sites, budget.measure, config.units)
            check_reachable(budget, dense_prices, sites, lambda site: least_units(site, config))


def _refuse_keep(model: PreTrainedModel, config: PruneConfig, sites: Sequence[Site]) -> None:
    """Refuse to keep more units than there are, or fewer than those of the sites that stay whole."""
    config.stop.units_left(sum(site.size for site in sites if site.kind in config.units))
    if config.keep is not None:

        def least(site: Site) -> int:
            return 0 if competes(site, config.units) else units(site)

        check_reachable(budget_of(config, sites), prices(model, sites, "units", config.units), sites, least)
