"""Parses the kinds of units to score, and checks that a criterion has scores for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from headprune.criteria.registry import KINDS, REGISTRY, Criterion
from headprune.errors import CriterionError

if TYPE_CHECKING:
    from headprune.units import Kind


def as_kinds(units: Any) -> tuple[Kind, ...]:
    """("heads", "neurons") from a tuple of them or from "heads,neurons", always in this order."""
    named = units.split(",") if isinstance(units, str) else units
    try:
        words = {word.strip() for word in named}
    except (TypeError, AttributeError):
        words = set()
    if not words or not words <= {*KINDS}:
        raise CriterionError(f"units must be heads, neurons or both, such as 'heads,neurons', not {units!r:.60}.")
    return tuple(kind for kind in KINDS if kind in words)


def check_kinds(criteria: Iterable[Criterion], kinds: Sequence[Kind]) -> None:
    """Refuse a criterion without scores for one of these kinds."""
    for criterion in criteria:
        for kind in kinds:
            if kind not in criterion.kinds:
                others = ", ".join(name for name in sorted(REGISTRY) if _has_scores(name, kind))
                raise CriterionError(f"{criterion} has no score for {kind}; criteria that have one are: {others}.")


def _has_scores(name: str, kind: Kind) -> bool:
    try:
        return kind in REGISTRY[name]().kinds
    except TypeError:  # its options have no defaults
        return False
