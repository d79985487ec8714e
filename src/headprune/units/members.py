"""Heads and masks: pure values, no model in sight."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from headprune.errors import HeadSelectionError


class Head(NamedTuple):
    """One attention head: the index of its site and its ORIGINAL index there, however many have gone."""

    site: int
    index: int  # type: ignore[assignment]  # the head's name for it wins over tuple.index


def as_heads(heads: Iterable[tuple[int, int]]) -> list[Head]:
    """Check that `heads` is an iterable of (site, head) pairs of whole numbers without repeats."""
    result: list[Head] = []
    try:
        pairs = list(heads)
    except TypeError:
        raise HeadSelectionError(
            f"Heads must be an iterable of (site, head) pairs such as [(0, 3), (2, 1)], not {heads!r}."
        ) from None
    for pair in pairs:
        try:
            site, index = pair
        except (TypeError, ValueError):
            raise HeadSelectionError(f"A head must be a (site, head) pair such as (0, 3), not {pair!r}.") from None
        try:
            if isinstance(site, bool) or isinstance(index, bool):
                raise TypeError
            result.append(Head(operator.index(site), operator.index(index)))  # numpy's and torch's integers as well
        except TypeError:
            raise HeadSelectionError(f"A head must be a pair of whole numbers such as (0, 3), not {pair!r}.") from None
    repeated = sorted({head for head in result if result.count(head) > 1})
    if repeated:
        raise HeadSelectionError(f"Head {tuple(repeated[0])} is listed more than once; list every head once.")
    return result


class _Site(Protocol):
    @property
    def kept(self) -> tuple[int, ...]: ...
    @property
    def original_heads(self) -> int: ...


def kept_mask(sites: Sequence[_Site]) -> torch.Tensor:
    """Bool [sites x heads], True = kept; sites with fewer heads than the widest are padded with False."""
    mask = torch.zeros(len(sites), max((site.original_heads for site in sites), default=0), dtype=torch.bool)
    for row, site in enumerate(sites):
        mask[row, list(site.kept)] = True
    return mask


def nan_scores(sites: Sequence[_Site]) -> torch.Tensor:
    """A score [sites x heads] in float64 with nothing in it yet."""
    return torch.full(kept_mask(sites).shape, torch.nan, dtype=torch.float64)
