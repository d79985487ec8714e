"""Members of sites, and masks and scores over them: plain values without a model."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from headprune.errors import HeadSelectionError


class Member(NamedTuple):
    """One head, or one neuron: the index of its site and its ORIGINAL index there, however many were removed."""

    site: int
    index: int  # type: ignore[assignment]  # overrides tuple.index


Head = Member  # the name of a member where the units of a site are heads


def as_members(pairs: Iterable[tuple[int, int]], word: str = "head") -> list[Member]:
    """Check that `pairs` is an iterable of (site, index) pairs of whole numbers without repeats."""
    result: list[Member] = []
    try:
        listed = list(pairs)
    except TypeError:
        raise HeadSelectionError(
            f"{word.capitalize()}s must be an iterable of (site, {word}) pairs such as [(0, 3), (2, 1)], not {pairs!r}."
        ) from None
    for pair in listed:
        try:
            site, index = pair
        except (TypeError, ValueError):
            raise HeadSelectionError(f"A {word} must be a (site, {word}) pair such as (0, 3), not {pair!r}.") from None
        try:
            if isinstance(site, bool) or isinstance(index, bool):
                raise TypeError
            result.append(Member(operator.index(site), operator.index(index)))  # integers of numpy and torch as well
        except TypeError:
            raise HeadSelectionError(
                f"A {word} must be a pair of whole numbers such as (0, 3), not {pair!r}."
            ) from None
    seen: set[Member] = set()
    for member in result:
        if member in seen:
            raise HeadSelectionError(
                f"{word.capitalize()} {tuple(member)} is listed more than once; list every {word} once."
            )
        seen.add(member)
    return result


def by_site(members: Iterable[Member]) -> dict[int, list[int]]:
    """site -> indices, in the order of the members."""
    result: dict[int, list[int]] = {}
    for member in members:
        result.setdefault(member.site, []).append(member.index)
    return result


class _Site(Protocol):
    @property
    def kept(self) -> tuple[int, ...]: ...
    @property
    def original(self) -> int: ...


def widest(sites: Sequence[_Site]) -> int:
    """The columns of a table [sites x members]."""
    return max((site.original for site in sites), default=0)


def kept_mask(sites: Sequence[_Site]) -> torch.Tensor:
    """Bool [sites x members], True = kept; sites with fewer members than the widest are padded with False."""
    mask = torch.zeros(len(sites), widest(sites), dtype=torch.bool)
    for row, site in enumerate(sites):
        mask[row, list(site.kept)] = True
    return mask


def nan_scores(sites: Sequence[_Site]) -> torch.Tensor:
    """A score [sites x members] in float64, all NaN."""
    return torch.full(kept_mask(sites).shape, torch.nan, dtype=torch.float64)
