"""How sure a number is: 95 % intervals over samples, and whether two numbers on the same samples differ.

A metric of n samples comes with `outcomes`, one number per sample whose mean is the metric (its jackknife
pseudo-values): for accuracy 1 where a sample is right and 0 where it is wrong. Their spread over the square root of n is
the metric's standard error, and the spread of differences of outcomes that of a difference.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

Z = 1.959963984540054  # two-sided 95 % of the normal distribution


class Interval(NamedTuple):
    low: float
    high: float


def wilson(successes: float, count: int) -> Interval:
    """Of a share: never empty, even where all or none of the samples are right."""
    if not count:
        return Interval(math.nan, math.nan)
    share, square = successes / count, Z * Z
    centre = (share + square / (2 * count)) / (1 + square / count)
    half = Z / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def standard_error(outcomes: torch.Tensor) -> float:
    """Of the mean of these outcomes; NaN for a single one."""
    return float(outcomes.std()) / math.sqrt(len(outcomes)) if len(outcomes) > 1 else math.nan


def interval(outcomes: torch.Tensor) -> Interval:
    """Of the mean of outcomes: Wilson's for those that are right or wrong, else by the normal distribution."""
    if len(outcomes) and bool(((outcomes == 0) | (outcomes == 1)).all()):
        return wilson(float(outcomes.sum()), len(outcomes))
    mean, error = float(outcomes.mean()), standard_error(outcomes)
    return Interval(mean - Z * error, mean + Z * error)


class Difference(NamedTuple):
    """The mean difference of two sets of outcomes of the same samples, and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def real(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0


def paired(one: torch.Tensor, other: torch.Tensor) -> Difference:
    """one - other. With few samples that differ, a normal interval would be too sure of itself, so two differences, one
    each way, are added (Agresti and Min 2005)."""
    gap = one - other
    value = float(gap.mean())
    padded = torch.cat([gap, gap.new_tensor([1.0, -1.0]) * max(float(gap.abs().max()), torch.finfo(gap.dtype).tiny)])
    centre, error = float(padded.mean()), standard_error(padded)
    return Difference(value, centre - Z * error, centre + Z * error)


def ratio_outcomes(numerators: torch.Tensor, denominators: torch.Tensor) -> torch.Tensor:
    """Outcomes of sum(numerators) / sum(denominators) over samples, to first order."""
    ratio = numerators.sum() / denominators.sum()
    return ratio + (numerators - ratio * denominators) / denominators.mean()
