"""The interval of a difference over samples and runs, against SciPy and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from headprune.measure.intervals import Z, paired_difference, repeated_difference, students_quantile


@pytest.mark.parametrize("degrees", [1, 2, 4, 9, 10, 15, 30, 200])
def test_students_quantile(degrees: int) -> None:
    assert students_quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-3)


def test_equal_runs_add_nothing_to_the_interval_over_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    expected = paired_difference(one, other)
    assert repeated_difference(one.repeat(3, 1), other.repeat(3, 1)) == pytest.approx(expected)
    assert repeated_difference(one[None], other[None]) == pytest.approx(expected)


def test_runs_that_differ_widen_it_by_students_interval() -> None:
    """All samples of a run differ by the same, so that only runs vary."""
    gaps = torch.tensor([0.1, 0.2, 0.6], dtype=torch.float64)
    one = gaps[:, None].expand(3, 1000)
    difference = repeated_difference(one, torch.zeros_like(one))
    over_runs = stats.t.ppf(0.975, 2) * stats.sem(gaps.numpy())
    # Two samples more, one in each direction of the largest difference, as for any paired difference.
    padded = torch.cat([one.mean(0), torch.tensor([0.3, -0.3], dtype=torch.float64)])
    over_samples = Z * float(padded.std()) / math.sqrt(1002)
    assert difference.value == pytest.approx(0.3)
    assert (difference.high - difference.low) / 2 == pytest.approx(math.hypot(over_runs, over_samples), rel=1e-4)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """Differences with an effect of the run and of the sample: the true mean is inside in about 95 of 100 cases."""
    generator = torch.Generator().manual_seed(0)
    inside = 0
    for _ in range(400):
        runs = 0.5 * torch.randn(5, 1, generator=generator, dtype=torch.float64)
        samples = torch.randn(1, 200, generator=generator, dtype=torch.float64)
        noise = torch.randn(5, 200, generator=generator, dtype=torch.float64)
        one = 0.3 + runs + samples + noise
        low, high = repeated_difference(one, torch.zeros_like(one))[1:]
        inside += low <= 0.3 <= high
    # Five standard deviations of a binomial count around 95 %, and conservative intervals hold it more often.
    assert inside / 400 > 0.95 - 5 * math.sqrt(0.95 * 0.05 / 400)
