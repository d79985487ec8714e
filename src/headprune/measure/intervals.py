"""95 % intervals of metrics over samples, and of the difference of two metrics on the same samples.

A metric of n samples comes with values `per_sample` whose mean is the metric (its jackknife pseudo-values): for
accuracy 1 where a sample is right and 0 where it is wrong. Their standard deviation over the square root of n is the
standard error of the metric, and that of the differences of two such sets the standard error of the difference.
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
    # At the ends the formula gives 0 and 1 but for rounding.
    return Interval(0.0 if share == 0 else centre - half, 1.0 if share == 1 else centre + half)


def standard_error(per_sample: torch.Tensor) -> float:
    """Of the mean of these values; NaN for a single one."""
    return float(per_sample.std()) / math.sqrt(len(per_sample)) if len(per_sample) > 1 else math.nan


def interval(per_sample: torch.Tensor) -> Interval:
    """Of the mean of these values: Wilson's where they are right or wrong, else by the normal distribution."""
    if len(per_sample) and bool(((per_sample == 0) | (per_sample == 1)).all()):
        return wilson(float(per_sample.sum()), len(per_sample))
    mean, error = float(per_sample.mean()), standard_error(per_sample)
    return Interval(mean - Z * error, mean + Z * error)


class Difference(NamedTuple):
    """The mean difference of two sets of values of the same samples, and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def real(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0


def paired_difference(one: torch.Tensor, other: torch.Tensor) -> Difference:
    """one - other. With few samples that differ, a normal interval would be too narrow, so two differences, one in each
    direction, are added (Agresti and Min 2005)."""
    gap = one - other
    value = float(gap.mean())
    padded = torch.cat([gap, gap.new_tensor([1.0, -1.0]) * max(float(gap.abs().max()), torch.finfo(gap.dtype).tiny)])
    centre, error = float(padded.mean()), standard_error(padded)
    return Difference(value, centre - Z * error, centre + Z * error)


def repeated_difference(one: torch.Tensor, other: torch.Tensor) -> Difference:
    """The mean of one - other, [runs x samples], where runs differ in what they were calibrated on and share their
    samples.

    Its variance is that over samples, of the means over runs, and that over runs.
    """
    return with_runs(paired_difference(one.mean(0), other.mean(0)), (one - other).mean(1))


def with_runs(over_samples: Difference, by_run: torch.Tensor) -> Difference:
    """A difference whose interval is over samples alone, widened by the variance of its values by run, with Student's
    quantile as there are few."""
    over_runs = students_quantile(len(by_run) - 1) * standard_error(by_run) if len(by_run) > 1 else 0.0
    centre = (over_samples.low + over_samples.high) / 2
    half = math.hypot((over_samples.high - over_samples.low) / 2, over_runs)
    return Difference(over_samples.value, centre - half, centre + half)


def students_quantile(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's distribution: tabulated, and by Cornish and Fisher's expansion from ten
    degrees of freedom on, where it is exact to three digits."""
    table = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
    if degrees <= len(table):
        return table[degrees - 1]
    first, second = (Z**3 + Z) / 4, (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / degrees + second / degrees**2 + third / degrees**3


def ratio_per_sample(numerators: torch.Tensor, denominators: torch.Tensor) -> torch.Tensor:
    """The values per sample of sum(numerators) / sum(denominators), to first order."""
    ratio = numerators.sum() / denominators.sum()
    return ratio + (numerators - ratio * denominators) / denominators.mean()
