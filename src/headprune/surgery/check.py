"""Refusing removals that make no sense or cannot be exact, before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence

from headprune.errors import HeadSelectionError, UnsupportedModelError
from headprune.units import Member, Site


def check_removable(sites: Sequence[Site], heads: Sequence[Member]) -> None:
    """Raise unless all these heads are there, form whole units, and can be removed exactly."""
    wanted = set(heads)
    for site in sites:
        everything = {Member(site.index, member) for member in site.kept}
        if site.obstacle_to_emptying and everything and everything <= wanted and not site.obstacle:
            raise UnsupportedModelError(
                f"Not all heads of site {site.index} ({site.path}) can be removed: {site.obstacle_to_emptying}; leave "
                "one unit."
            )
    for head in heads:
        if not 0 <= head.site < len(sites):
            raise HeadSelectionError(
                f"Head {tuple(head)} does not exist: the model has {len(sites)} sites, numbered 0 to {len(sites) - 1}."
            )
        site = sites[head.site]
        if not 0 <= head.index < site.original:
            raise HeadSelectionError(
                f"Head {tuple(head)} does not exist: site {site.index} ({site.path}) has heads 0 to "
                f"{site.original - 1}."
            )
        if head.index not in site.kept:
            raise HeadSelectionError(f"Head {tuple(head)} has been removed already; leave it out.")
        missing = [other.index for other in site.unit(head.index) if other not in wanted]
        if missing:
            unit = [other.index for other in site.unit(head.index)]
            raise HeadSelectionError(
                f"Head {tuple(head)} shares its KV head with others: at site {site.index} ({site.path}) heads {unit} "
                f"can only go together, so add {missing} or leave the group alone."
            )
        if site.obstacle:
            raise UnsupportedModelError(
                f"Heads of site {site.index} ({site.path}) cannot be removed exactly: {site.obstacle}; only gating "
                "works."
            )
