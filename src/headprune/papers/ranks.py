"""How far two orders of the same heads agree: rank correlations and the number of pairs in the other order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Values = Sequence[float] | npt.NDArray[np.float64]


def spearman(one: Values, other: Values) -> float:
    """Correlation of the ranks, ties with the mean of theirs; NaN where one of the two is constant."""
    first, second = (mean_ranks(values) - (len(values) + 1) / 2 for values in (one, other))
    scale = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / scale if scale else float("nan")


def kendall(one: Values, other: Values) -> float:
    """Kendall's tau-b: (pairs in the same order - pairs in the other) / the pairs that are not tied; NaN where one of
    the two is constant."""
    first, second = (_pair_signs(values) for values in (one, other))
    scale = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / scale if scale else float("nan")


def inversions(one: Values, other: Values) -> int:
    """Pairs that the two put in opposite orders; a tie is in no order."""
    return int((_pair_signs(one) * _pair_signs(other) < 0).sum())


def mean_ranks(values: Values) -> npt.NDArray[np.float64]:
    """Ranks from 1, equal values with the mean of their ranks."""
    array = np.asarray(values, dtype=np.float64)
    _, place, counts = np.unique(array, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[place]


def _pair_signs(values: Values) -> npt.NDArray[np.float64]:
    """-1, 0 or 1 for every pair of places."""
    array = np.asarray(values, dtype=np.float64)
    left, right = np.triu_indices(len(array), k=1)
    return np.sign(array[right] - array[left])
