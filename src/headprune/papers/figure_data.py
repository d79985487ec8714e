"""The data of figures 3, 4 and 5 for one model, from published files or from runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Curve = Sequence[tuple[int, float]]  # (heads removed, accuracy), counting a tied head once per use

# Criterion -> its name in the figures.
CRITERIA = {
    "gnorm": "Greedy-Gnorm",
    "inverse:gnorm": "Inverse Greedy-Gnorm",
    "entropy": "Attention entropy (AE)",
    "inverse:entropy": "Inverse AE",
}


@dataclass(frozen=True)
class Panel:
    """One model: its curves by criterion, random trials by heads removed, and the mask where pruning stops."""

    title: str
    heads: int  # counted as in the curves
    metric: str = "accuracy"
    curves: Mapping[str, Curve] = field(default_factory=dict)
    trials: Mapping[int, Sequence[float]] = field(default_factory=dict)
    mask: Sequence[Sequence[bool]] | None = None  # True = kept
    uses: int = 1  # of every site in a forward pass; the mask is drawn once per use
    stop: int | None = None  # heads removed at the stop, counted as in the curves
