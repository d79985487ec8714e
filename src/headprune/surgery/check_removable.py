"""Refuses removals that are invalid or cannot be exact, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

from headprune.display import counted
from headprune.errors import HeadSelectionError, UnsupportedModelError
from headprune.units import Member, Site


def check_removable(sites: Sequence[Site], members: Sequence[Member]) -> None:
    """Raise unless all these members exist, form whole units, and can be removed exactly."""
    chosen: dict[int, set[int]] = {}
    for member in members:
        chosen.setdefault(member.site, set()).add(member.index)
    for number in chosen:
        if 0 <= number < len(sites):
            _refuse_emptying(sites[number], chosen[number])
    present = {number: set(sites[number].kept) for number in chosen if 0 <= number < len(sites)}
    for member in members:
        if member.site not in present:
            raise HeadSelectionError(
                f"{_word(sites, member)} {tuple(member)} does not exist: the model has "
                f"{counted(len(sites), 'site')}, numbered 0 to {len(sites) - 1}."
            )
        site = sites[member.site]
        if member.index not in present[member.site]:
            _refuse_absent(site, member)
        if site.group > 1:
            _refuse_part_of_a_unit(site, member, chosen[member.site])
        if site.obstacle:
            raise UnsupportedModelError(
                f"{site.kind.capitalize()} of site {site.index} ({site.path}) cannot be removed exactly: "
                f"{site.obstacle}; only gating works."
            )


def _word(sites: Sequence[Site], member: Member) -> str:
    """The word for a member of this site; beyond all sites, of the last one."""
    site = sites[-1] if sites and member.site >= len(sites) else sites[0] if sites else None
    return "Member" if site is None else site.word.capitalize()


def _refuse_emptying(site: Site, chosen: set[int]) -> None:
    if site.obstacle_to_emptying and not site.obstacle and site.kept and chosen.issuperset(site.kept):
        raise UnsupportedModelError(
            f"Not all {site.kind} of site {site.index} ({site.path}) can be removed: {site.obstacle_to_emptying}; "
            "leave one unit."
        )


def _refuse_absent(site: Site, member: Member) -> None:
    word = site.word.capitalize()
    if 0 <= member.index < site.original:
        raise HeadSelectionError(f"{word} {tuple(member)} has been removed already; leave it out.")
    raise HeadSelectionError(
        f"{word} {tuple(member)} does not exist: site {site.index} ({site.path}) has {site.kind} 0 to "
        f"{site.original - 1}."
    )


def _refuse_part_of_a_unit(site: Site, member: Member, chosen: set[int]) -> None:
    unit = [other.index for other in site.unit(member.index)]
    missing = [index for index in unit if index not in chosen]
    if missing:
        shared = "shares its KV head with others" if site.kind == "heads" else "is part of a group"
        raise HeadSelectionError(
            f"{site.word.capitalize()} {tuple(member)} {shared}: at site {site.index} ({site.path}) {site.kind} {unit} "
            f"can only be removed together, so add {missing} or leave the group out."
        )
