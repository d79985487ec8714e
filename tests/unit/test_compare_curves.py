"""Curves against each other: areas over a range, what ranks, what is real, what cannot be paired, how it is said."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from rich.console import Console

from headprune.cli.comparison_table import print_comparison
from headprune.measure.compare_curves import NO_PER_SAMPLE, OTHER_SAMPLES, Curve, comparable, rank_curves, usable_until
from headprune.measure.curves import area_per_sample, shares, signed_area, weighted_area, weights
from headprune.measure.intervals import interval, paired_difference
from headprune.measure.metrics import METRICS, Metric
from headprune.measure.trajectory import Step
from headprune.reports.format import interval_text, measured_text, removed_text, spread_text, stop_text, verdict

ACCURACY, PERPLEXITY, ERRORS = METRICS["accuracy"], METRICS["perplexity"], METRICS["error_rate"]


def curve(
    values: Sequence[float],
    left: Sequence[int] | None = None,
    per_sample: Sequence[torch.Tensor | None] | None = None,
) -> list[Step]:
    """Steps with these values; one head goes per step unless `left` says how many are left."""
    heads = list(left or range(len(values) - 1, -1, -1))
    return [
        Step(n, (), None, value, 1 - n / 100, None, {"heads": heads[n]}, {"heads": heads[n]}, 1, 1, None)
        if per_sample is None or per_sample[n] is None
        else Step(
            *(n, (), None, value, 1 - n / 100, None, {"heads": heads[n]}, {"heads": heads[n]}, 1, 1, None),
            interval=interval(per_sample[n]),  # type: ignore[arg-type]
            per_sample=per_sample[n],
        )
        for n, value in enumerate(values)
    ]


def right(counts: Sequence[int], samples: int = 100, shift: int = 0) -> list[Step]:
    """Accuracy: at each step so many of the samples are right, the first ones after `shift`."""
    actual = [torch.roll((torch.arange(samples) < count).double(), shift) for count in counts]
    return curve([float(one.mean()) for one in actual], per_sample=actual)


def row(name: str, *trials: list[Step], metric: Metric = ACCURACY, samples: Any = "these") -> Curve:
    return Curve(name, [f"{name}-{n}" for n in range(len(trials))], metric, trials, samples)


# --- areas ---


def slow_mean(places: Sequence[float], values: Sequence[float], until: float) -> float:
    """The mean of straight lines between points, from 0 to `until`, over a fine grid that has all their kinks."""
    grid = numpy.unique([*numpy.linspace(0, until, 501), *(place for place in places if place < until)])
    return float(numpy.trapezoid(numpy.interp(grid, places, values), grid) / until)


@pytest.mark.parametrize("until", [0.05, 0.25, 0.5, 0.61, 0.9, 1.0])
@pytest.mark.parametrize("left", [range(12, -1, -1), [12, 11, 7, 6, 2, 0], [12, 4, 0]])
def test_the_area_of_a_range_is_the_mean_of_the_curve_there(left: Sequence[int], until: float) -> None:
    rng = numpy.random.default_rng(len(list(left)))
    values = rng.uniform(0.2, 0.9, len(list(left))).tolist()
    steps = curve(values, list(left))
    assert signed_area(ACCURACY, steps, until) == pytest.approx(slow_mean(shares(steps), values, until))
    assert sum(weights(steps, until)) == pytest.approx(1)
    negative = [-math.log(value) for value in values]
    assert signed_area(PERPLEXITY, steps, until) == pytest.approx(slow_mean(shares(steps), negative, until))


def test_a_range_beyond_the_end_of_a_curve_ends_with_it() -> None:
    steps = curve([0.9, 0.7, 0.5], [12, 9, 6])
    assert signed_area(ACCURACY, steps, 0.8) == signed_area(ACCURACY, steps) == pytest.approx(0.7)
    assert math.isnan(signed_area(ACCURACY, curve([0.9])))


def test_a_metric_of_zero_has_an_area_where_smaller_is_better() -> None:
    steps = curve([0.0, 0.1, 0.4])
    assert signed_area(ERRORS, steps) == pytest.approx(-(0.05 + 0.25) / 2)
    assert weighted_area(ERRORS, steps) == pytest.approx(-(1 * 0.0 + 0.5 * 0.1) / 1.5)
    assert signed_area(METRICS["mse"], curve([2.0, 4.0])) == pytest.approx(-3)


@pytest.mark.parametrize("metric", [ACCURACY, PERPLEXITY, ERRORS], ids=lambda metric: metric.name)
def test_the_area_of_each_sample_is_that_of_its_own_curve(metric: Metric) -> None:
    rng = torch.Generator().manual_seed(3)
    per_sample = list(torch.rand(5, 7, generator=rng, dtype=torch.float64))
    finish: Callable[[float], float] = math.exp if metric.logarithmic else float
    steps = curve([finish(float(one.mean())) for one in per_sample], [10, 9, 5, 4, 0], per_sample)
    sign = 1 if metric.higher_is_better else -1
    for until in (0.3, 1.0):
        actual = area_per_sample(metric, steps, until)
        assert actual is not None
        slow = [slow_mean(shares(steps), [sign * float(one[n]) for one in per_sample], until) for n in range(7)]
        assert actual.tolist() == pytest.approx(slow)
        assert float(actual.mean()) == pytest.approx(signed_area(metric, steps, until))


def test_unknown_outcomes_outside_the_range_do_not_matter() -> None:
    known = torch.ones(4, dtype=torch.float64)
    steps = curve([1.0, 1.0, 1.0, math.nan, 0.1], per_sample=[known, known, known, None, None])
    assert area_per_sample(ACCURACY, steps, 0.5) is not None
    assert area_per_sample(ACCURACY, steps) is None
    assert signed_area(ACCURACY, steps, 0.5) == 1
    assert math.isnan(signed_area(ACCURACY, steps))


# --- what ranks ---

USEFUL = [90, 89, 88, 84, 60, 30, 30, 30, 30, 30, 30]  # within ten points of dense until 30 % are gone
TAIL = [90, 85, 82, 78, 65, 60, 60, 60, 60, 60, 60]  # worse there, and better where both are of no use


def test_the_range_where_models_are_useless_does_not_decide() -> None:
    useful, tail = row("useful", right(USEFUL)), row("tail", right(TAIL))
    for order in ([useful, tail], [tail, useful]):
        assert usable_until(order) == pytest.approx(0.3)
        first, second = rank_curves(order)
        assert (first.name, second.name) == ("useful", "tail")
        assert first.area < second.area  # the whole curve says the opposite
        assert first.usable_area == pytest.approx((0.90 / 2 + 0.89 + 0.88 + 0.84 / 2) / 3)
        assert first.usable_until == second.usable_until


def test_any_of_the_runs_makes_a_share_usable() -> None:
    """Each of them alone, too; for perplexity the drop is relative."""
    short, long = right([90, 85, 70, 50, 50]), right([90, 70, 60, 50, 50])
    assert usable_until([row("short", short), row("long", long)]) == 0.25
    assert usable_until([row("random", long, long, short)]) == 0.25
    assert usable_until([row("long", long)]) == 0
    rising = curve([20.0, 21.0, 22.0, 22.1, 30.0])
    assert usable_until([row("text", rising, metric=PERPLEXITY)]) == 0.5


def test_a_run_that_ends_early_ends_the_range() -> None:
    long, short = right([90] * 11), curve([0.9, 0.9, 0.8], [10, 9, 8])
    both = [row("long", long), row("short", short)]
    assert usable_until(both) == pytest.approx(0.2)
    assert comparable(both)
    assert [one.name for one in rank_curves(both)] == ["long", "short"]


def test_where_nothing_is_of_use_the_whole_curve_ranks() -> None:
    one, other = row("one", right([90, 20, 10])), row("other", right([90, 30, 10]))
    rows = rank_curves([one, other])
    assert [(actual.name, actual.usable_until) for actual in rows] == [("other", 0), ("one", 0)]
    assert rows[0].usable_area == rows[0].area
    assert "the whole curve ranks" in verdict(rows)[0]
    early = row("early", curve([0.9, 0.2], [10, 9]))
    assert not comparable([one, early])  # nor do their whole curves compare
    assert [actual.name for actual in rank_curves([one, early])] == ["one", "early"]
    assert verdict(rank_curves([one, early])) == []


def test_different_metrics_are_not_ranked() -> None:
    rows = rank_curves([row("one", right([90, 89])), row("other", curve([3.0, 3.1]), metric=PERPLEXITY)])
    assert [actual.name for actual in rows] == ["one", "other"]
    assert all(not actual.ahead for actual in rows)


def test_values_that_are_no_numbers() -> None:
    """Beyond the usable range they change nothing; inside it a run comes last. All of it is JSON."""
    late = row("late", curve([0.9, 0.9, 0.85, math.nan, math.nan]))
    early = row("early", curve([0.9, math.nan, 0.9, 0.9, 0.9]))
    rows = rank_curves([early, late, row("good", curve([0.9, 0.9, 0.9, 0.5, 0.5]))])
    assert [actual.name for actual in rows] == ["good", "late", "early"]
    assert rows[0].usable_until == 0.5
    text = json.dumps([actual.to_json() for actual in rows], allow_nan=False)
    assert [actual["usable_area"] is None for actual in json.loads(text)] == [False, False, True]
    assert rank_curves([row("none", curve([math.nan] * 4)), row("nor", curve([math.nan] * 4))])[0].usable_until == 0


# --- what is real ---


def test_differences_are_paired_over_samples() -> None:
    one, other = right(USEFUL), right(TAIL)
    best, second = rank_curves([row("one", one), row("other", other)])
    (ahead,) = best.ahead
    assert (ahead.of, second.ahead, ahead.unpaired) == ("other", [], None)
    for share, place in (("25%", 3), ("50%", 5), ("75%", 8)):
        assert ahead.metric[share] == paired_difference(one[place].per_sample, other[place].per_sample)  # type: ignore[arg-type]
        assert ahead.metric[share].value == pytest.approx((USEFUL[place] - TAIL[place]) / 100)  # type: ignore[union-attr]
    areas = [torch.stack([s.per_sample for s in steps[:4]]) for steps in (one, other)]  # type: ignore[misc]
    trapezoids = torch.tensor([0.5, 1, 1, 0.5], dtype=torch.float64) / 3
    expected = paired_difference(*((trapezoids[:, None] * part).sum(0) for part in areas))
    assert ahead.usable_area == pytest.approx(expected)
    assert ahead.usable_area.real  # type: ignore[union-attr]
    assert ahead.area.value == pytest.approx(best.area - second.area)  # type: ignore[union-attr]


def test_the_best_is_paired_with_all_and_each_other_with_the_next() -> None:
    rows = rank_curves(
        [row(name, right([90, count, 50])) for name, count in zip("abcd", (89, 87, 85, 83), strict=True)]
    )
    assert [[ahead.of for ahead in actual.ahead] for actual in rows] == [["b", "c", "d"], ["c"], ["d"], []]


def test_smaller_perplexity_is_ahead() -> None:
    low, high = (
        curve([math.exp(float(part.mean())) for part in parts], per_sample=parts)
        for parts in (
            [torch.full((50,), level, dtype=torch.float64) + torch.linspace(0, 1, 50) for level in levels]
            for levels in ((3.0, 3.01, 3.02, 4.0), (3.0, 3.06, 3.07, 4.5))
        )
    )
    best, _ = rank_curves([row("high", high, metric=PERPLEXITY), row("low", low, metric=PERPLEXITY)])
    assert best.name == "low"
    assert best.ahead[0].metric["50%"].value == pytest.approx(0.05)  # type: ignore[union-attr]
    assert "low is ahead of high by" in verdict([best, _])[1]
    assert "at 50% ahead by 5.1% [" in verdict([best, _])[1]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (row("other", right([90, 80, 50]), samples="others"), OTHER_SAMPLES),
        (row("other", right([45, 40, 25], samples=50)), OTHER_SAMPLES),
        (row("other", curve([0.9, 0.8, 0.5])), NO_PER_SAMPLE),
    ],
)
def test_runs_that_cannot_be_paired_say_so(other: Curve, why: str) -> None:
    rows = rank_curves([row("one", right([90, 88, 50])), other])
    (ahead,) = rows[0].ahead
    assert (ahead.unpaired, ahead.usable_area, set(ahead.metric.values())) == (why, None, {None})
    assert verdict(rows)[1] == f"one and other cannot be paired: {why}."


def test_random_is_the_mean_of_its_trials_with_its_spread() -> None:
    trials = [right([90, 88, 60, 50, 50]), right([90, 80, 70, 50, 50]), right([90, 84, 50, 50, 50])]
    rows = rank_curves([row("random", *trials), row("one", right([90, 90, 89, 60, 50]))])
    random = rows[1]
    assert (random.name, random.runs) == ("random", ["random-0", "random-1", "random-2"])
    assert random.metric["25%"] == pytest.approx(0.84)
    assert random.spread["25%"] == pytest.approx((0.80, 0.88))
    assert rows[0].spread["25%"] is None
    mean = torch.stack([steps[1].per_sample for steps in trials]).mean(0)  # type: ignore[misc]
    assert random.interval["25%"] == pytest.approx(interval(mean))
    assert rows[0].ahead[0].metric["25%"].value == pytest.approx(0.06)  # type: ignore[union-attr]
    areas = [signed_area(ACCURACY, steps, 0.5) for steps in trials]
    assert random.usable_area == pytest.approx(sum(areas) / 3)
    assert random.spread_area == pytest.approx((min(areas), max(areas)))


# --- how it is said ---


def test_the_verdict_says_where_a_curve_is_ahead() -> None:
    said = verdict(rank_curves([row("a", right(USEFUL)), row("b", right(TAIL))]))
    assert said[0] == (
        "Ranked by the accuracy up to 30% of the heads removed: as far as any run stays within 10 points of dense."
    )
    assert said[1].startswith("a is ahead of b by 4.3 points [")  # 0, 4, 6 and 6 by trapezoids
    assert " up to 30%; at 25% ahead by 6.0 [" in said[1]
    assert "; at 50% behind by 30.0 [" in said[1]
    assert "; at 75% behind by 30.0 [" in said[1]


def test_the_verdict_says_what_cannot_be_told_apart() -> None:
    """Equal numbers of right samples, but other ones: the difference is noise."""
    counts = [90, 88, 86, 84, 82]
    curves = [row(name, right(counts, shift=shift)) for name, shift in (("a", 0), ("b", 7), ("c", 14))]
    said = verdict(rank_curves([*curves, row("d", right([90, 60, 50, 40, 30]))]))
    assert said[1].startswith("a and b cannot be told apart up to 100% (0.0 points [-")
    assert said[1].endswith("]), nor at 25%, 50% and 75%.")
    assert said[3].startswith("a is ahead of d by ")
    assert said[4] == "Neighbours that cannot be told apart either: b and c."


@pytest.mark.parametrize("width", [120, 80])
def test_the_table_fits_the_terminal(width: int) -> None:
    """Long names are folded; nothing is cut, whatever is known of a run."""
    rows = rank_curves(
        [
            row("residual-gradient+lstsq", right(USEFUL)),
            row("random", right(TAIL), right(USEFUL)),
            row("unknown", curve([0.9, 0.85, 0.8, math.nan, math.nan], [20, 19, 18, 15, 10])),
        ]
    )
    text = io.StringIO()
    print_comparison(Path("out"), rows, Console(file=text, width=width))
    assert "\u2026" not in text.getvalue()
    assert "nan" not in text.getvalue()
    assert all(len(line) <= width for line in text.getvalue().splitlines())
    table = " ".join(text.getvalue().split())
    for words in ("area to", "30% (all)", "25% gone", "1% / 5%", "78.0..84.0", "cannot be paired"):
        assert words in table
    (low, high), mean = interval(right([84])[0].per_sample), (0.84 + 0.78) / 2  # type: ignore[arg-type]
    assert f"[{100 * low:.1f}, {100 * high:.1f}]" in table
    assert f"{100 * mean:.1f} / 97.0" in table


def test_numbers_as_people_read_them() -> None:
    assert measured_text("accuracy", 0.872512, (0.848, 0.8931)) == "87.25% [84.8, 89.3]"
    assert measured_text("perplexity", 20.123, (19.5, 21.0)) == "20.12 [19.5, 21]"
    assert measured_text("error_rate", 0.05, None) == "5.00%"
    assert measured_text("accuracy", math.nan, (math.nan, math.nan)) == "-"
    assert interval_text("accuracy", (0.1, None)) == ""
    assert spread_text("f1", (0.1, 0.25)) == "10.0..25.0"
    assert spread_text("f1", None) == ""


def test_why_a_run_stopped() -> None:
    assert stop_text({"rule": "max_drop 0.01", "step": 4, "steps": 12}) == "Stopped at step 4 of 12 by max_drop 0.01."
    assert stop_text({"rule": "the end of the curve", "step": 9, "steps": 9}) == "At step 9 of 9, the end of the curve."
    assert stop_text({"step": 9, "steps": 9}) == ""
    kinds = {"heads": [12, 6], "neurons": [64, 48]}
    assert removed_text({"heads_before": 12, "heads_after": 6, "units": kinds}) == "6 of 12 heads and 16 of 64 neurons"
    assert removed_text({"heads_before": 12, "heads_after": 6}) == "6 of 12 heads"
