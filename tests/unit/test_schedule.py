"""Which units go next, and where a trajectory stops: on hand-made scores and curves, then in real runs."""

from __future__ import annotations

import copy
import functools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from sklearn.isotonic import IsotonicRegression

import headprune
from headprune.errors import DataError, HeadpruneError, ScheduleError
from headprune.measure.metrics import METRICS
from headprune.search.config import PruneConfig
from headprune.search.step_rule import StepRule
from headprune.search.stop import Stop, knee
from headprune.units.members import Head
from headprune.units.spec import ForwardNeeds
from helpers import difference, identical, kept_heads, outputs
from run_helpers import removal_order
from score_helpers import labelled
from zoo import ZOO

ACCURACY, PERPLEXITY = METRICS["accuracy"], METRICS["perplexity"]


def sites_of(name: str) -> Any:
    return headprune.resolve(ZOO[name].build())


# --- choosing ---


def test_the_lowest_score_goes_first() -> None:
    scores = torch.arange(12.0).reshape(3, 4).flip(0, 1)
    assert StepRule(every=3).choose(scores, sites_of("bert")) == [Head(2, 3), Head(2, 2), Head(2, 1)]


def test_equal_scores_go_in_order_of_site_and_head() -> None:
    scores = torch.ones(3, 4)
    scores[0, 0] = 2.0
    assert StepRule(every=4).choose(scores, sites_of("bert")) == [Head(0, 1), Head(0, 2), Head(0, 3), Head(1, 0)]


def test_a_group_has_the_mean_score_of_its_heads_and_goes_as_a_whole() -> None:
    scores = torch.full((3, 6), 5.0)
    scores[1, 0] = 0.0  # the lowest head of all, but its group has a mean of 3
    scores[1, 1] = 6.0
    scores[2, 4:] = 2.5
    assert StepRule(every=2).choose(scores, sites_of("llama-gqa")) == [Head(2, 4), Head(2, 5), Head(1, 0), Head(1, 1)]


def test_a_site_at_its_minimum_is_passed_over() -> None:
    scores = torch.arange(12.0).reshape(3, 4)
    assert StepRule(every=5, min_per_site=2).choose(scores, sites_of("bert")) == [
        *(Head(0, 0), Head(0, 1), Head(1, 0), Head(1, 1), Head(2, 0))
    ]


def test_a_minimum_counts_heads_where_units_are_groups() -> None:
    """Six heads in groups of two: a minimum of three leaves four, since the next group would leave two."""
    chosen = StepRule(every=9, min_per_site=3).choose(torch.zeros(3, 6), sites_of("llama-gqa"))
    assert [head.site for head in chosen] == [0, 0, 1, 1, 2, 2]


def test_nothing_may_go() -> None:
    assert StepRule(min_per_site=4).choose(torch.zeros(3, 4), sites_of("bert")) == []


@pytest.mark.parametrize(("most", "expected"), [(4, 4), (3, 2), (2, 2), (1, 2)])
def test_a_budget_is_not_overshot_but_by_a_first_unit(most: int, expected: int) -> None:
    assert len(StepRule(every=9).choose(torch.zeros(3, 6), sites_of("llama-gqa"), most)) == expected


def test_heads_that_cannot_be_removed_are_never_chosen() -> None:
    first, second, *rest = headprune.resolve(ZOO["bert"].build())
    sites = [replace(first, obstacle="a reason"), replace(second, needs=ForwardNeeds(empty="")), *rest]
    chosen = StepRule(every=99).choose(torch.zeros(len(sites), 4), sites)
    counts = Counter(member.site for member in chosen)
    assert counts == {1: 3, **{site.index: 4 for site in rest}}  # nothing of the first, all but one of the second


WRONG = {
    "kind": (lambda: PruneConfig(schedule="gready"), "no schedule 'gready'; choose one of greedy, one-shot"),
    "every": (lambda: PruneConfig(every=0), "every must be a whole number at least 1, not 0"),
    "minimum": (lambda: PruneConfig(min_per_site=-1), "min_per_site must be a whole number at least 0, not -1"),
    "text": (lambda: Stop(keep="half"), "a share such as 0.5 or a number of heads such as 36, not 'half'"),
    "yes": (lambda: Stop(keep=True), "a share such as 0.5 or a number of heads such as 36, not True"),
    "list": (lambda: Stop(keep=[3, 4]), "a share such as 0.5 or a number of heads such as 36, not"),
    "share": (lambda: Stop(keep=1.5), "between 0 and 1, but it is 1.5"),
    "negative-share": (lambda: Stop(keep=-0.1), "between 0 and 1, but it is -0.1"),
    "no-number": (lambda: Stop(keep=math.nan), "between 0 and 1, but it is nan"),
    "count": (lambda: Stop(keep=-3), "must not be negative, but it is -3"),
    "too-many": (lambda: Stop(keep=13).units_left(12), "has 12 heads, so 13 cannot be kept"),
    "drop": (lambda: Stop(max_drop=-0.1), "max_drop must not be negative"),
    "no-drop": (lambda: Stop(max_drop=math.nan), "max_drop must not be negative"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_rules(case: str) -> None:
    make, message = WRONG[case]
    with pytest.raises(ScheduleError, match=message) as error:
        make()
    assert isinstance(error.value, HeadpruneError)


# --- stopping, on curves made by hand ---


@pytest.mark.parametrize(
    ("keep", "total", "left"),
    [(0.5, 12, 6), (0.5, 13, 7), (0.3, 10, 3), (0.1 + 0.2, 10, 3), (1.0, 12, 12), (0.0, 12, 0), (5, 12, 5), (0, 12, 0)],
)
def test_a_share_is_rounded_up_to_whole_heads(keep: float | int, total: int, left: int) -> None:
    assert Stop(keep=keep).units_left(total) == left


HEADS = [6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(("keep", "step"), [(4, 2), (0.5, 3), (0, 6), (1.0, 0)])
def test_keep(keep: float | int, step: int) -> None:
    stop, flat = Stop(keep=keep), [0.9] * 7
    assert stop.decide(ACCURACY, flat, HEADS).step == step
    assert [stop.reached(ACCURACY, flat[: n + 1], HEADS[: n + 1]) for n in range(7)] == [n >= step for n in range(7)]


def test_keep_with_groups_takes_the_first_step_that_is_low_enough() -> None:
    assert Stop(keep=3).decide(ACCURACY, [0.9] * 4, [6, 4, 2, 0]).step == 2


def test_max_drop_takes_the_last_step_before_the_first_below_the_floor() -> None:
    values = [0.90, 0.89, 0.91, 0.85, 0.84, 0.95, 0.30]
    assert Stop(max_drop=0.05).decide(ACCURACY, values, HEADS).step == 3  # 0.95 later on does not count
    assert Stop(max_drop=0.0).decide(ACCURACY, values, HEADS).step == 0
    assert Stop(max_drop=0.6).decide(ACCURACY, values, HEADS).step == 6  # exactly at the floor is above it
    reached = [Stop(max_drop=0.05).reached(ACCURACY, values[: n + 1], HEADS[: n + 1]) for n in range(7)]
    assert reached == [False] * 4 + [True] * 3


def outcomes(rights: list[int], count: int) -> list[torch.Tensor]:
    """So many of so many samples are right at each step, the first ones."""
    return [(torch.arange(count) < right).double() for right in rights]


def test_a_dip_that_later_steps_do_not_confirm_is_noise() -> None:
    """With 64 samples one of them is 1.6 points: a limit of one point would stop at the first unlucky sample."""
    rights = [56, 55, 56, 56, 56, 56, 56, 30]
    values, heads = [right / 64 for right in rights], list(range(8, 0, -1))
    stop = Stop(max_drop=0.01)
    known = outcomes(rights, 64)
    assert stop.decide(ACCURACY, values, heads, known).step == 6
    assert stop.decide(ACCURACY, values, heads).step == 0  # without the samples, what was measured is all there is
    reached = [stop.reached(ACCURACY, values[: n + 1], heads[: n + 1], known[: n + 1]) for n in range(8)]
    assert reached == [False] * 7 + [True]


def test_a_drop_within_its_interval_does_not_end_the_run() -> None:
    """3 of 100 samples are lost: it may well be less than two points, so the curve is followed further."""
    known, stop = outcomes([90, 87], 100), Stop(max_drop=0.02)
    assert not stop.reached(ACCURACY, [0.9, 0.87], [4, 3], known)
    assert stop.decide(ACCURACY, [0.9, 0.87], [4, 3], known).step == 0  # but it is not the result
    known = outcomes([9000, 8700], 10000)
    assert stop.reached(ACCURACY, [0.9, 0.87], [4, 3], known)  # many samples know it


def test_limits_smaller_than_the_noise_are_said(caplog: pytest.LogCaptureFixture) -> None:
    Stop(max_drop=0.01).check(ACCURACY, 0.9, outcomes([58], 64)[0])
    assert "64 samples determine the accuracy only to within 0.07" in caplog.text
    assert "cannot be told from noise; use about " in caplog.text
    caplog.clear()
    Stop(max_drop=0.01).check(ACCURACY, 0.9, outcomes([9000], 10000)[0])
    assert caplog.text == ""
    Stop(keep=0).check(ACCURACY, 0.9, None)
    assert "keep=0 leaves no head;" in caplog.text


def test_a_dense_metric_that_is_no_number_has_no_drop() -> None:
    with pytest.raises(DataError, match="accuracy of the dense model is not a number"):
        Stop(max_drop=0.01).check(ACCURACY, math.nan, None)


def test_rules_combine_and_the_first_that_is_reached_counts() -> None:
    values, heads = [0.9, 0.89, 0.88, 0.5, 0.4], [12, 10, 8, 6, 4]
    both = Stop(keep=6, max_drop=0.05).decide(ACCURACY, values, heads)
    assert (both.step, both.rule) == (2, "max_drop 0.05")
    both = Stop(keep=10, max_drop=0.05).decide(ACCURACY, values, heads)
    assert (both.step, both.rule) == (1, "keep 10")
    assert Stop(keep=10, max_drop=0.05).reached(ACCURACY, values[:2], heads[:2])
    assert Stop().decide(ACCURACY, values, heads).rule == "the end of the curve"
    assert Stop(knee=True, keep=0.1).decide(ACCURACY, values, heads).rule == "knee"


@pytest.mark.parametrize("keep", [numpy.int64(4), torch.tensor(4), numpy.float32(0.25), torch.tensor(0.25)])
def test_numbers_of_numpy_and_torch_are_numbers(keep: Any) -> None:
    """They used to keep everything, silently."""
    model, batches = ZOO["bert"].build(), [labelled(ZOO["bert"], 0)]
    wanted = 4 if float(keep) == 4 else 3
    assert headprune.prune(model, batches, keep=keep, criterion="magnitude").result.heads == wanted


def test_max_drop_of_perplexity_is_a_relative_rise() -> None:
    assert Stop(max_drop=0.1).decide(PERPLEXITY, [20.0, 19.0, 22.0, 22.1, 20.0], HEADS[:5]).step == 2


def test_a_metric_that_is_no_number_is_below_every_floor() -> None:
    assert Stop(max_drop=0.5).decide(ACCURACY, [0.9, 0.9, math.nan], HEADS[:3]).step == 1


def test_no_rule_goes_to_the_end() -> None:
    assert Stop().decide(ACCURACY, [0.9, 0.1, 0.5], HEADS[:3]).step == 2
    assert not Stop().reached(ACCURACY, [0.9, 0.1], HEADS[:2])


def test_the_knee_of_a_broken_line_is_where_it_breaks() -> None:
    heads = list(range(10, -1, -1))
    flat_then_down = [0.9] * 8 + [0.6, 0.3, 0.0]
    assert knee(ACCURACY, flat_then_down, heads) == 7
    assert knee(PERPLEXITY, [10.0 + 5 * max(0, n - 4) for n in range(11)], heads) == 4
    slow_then_fast = [1 - 0.02 * n if n <= 6 else 0.88 - 0.22 * (n - 6) for n in range(11)]
    assert knee(ACCURACY, slow_then_fast, heads) == 6


def test_the_knee_of_a_circle_is_where_its_slope_is_that_of_the_chord() -> None:
    """y = sqrt(1 - x^2) lies farthest above 1 - x at x = 1 / sqrt 2."""
    heads = list(range(100, -1, -1))
    assert knee(ACCURACY, [math.sqrt(1 - (n / 100) ** 2) for n in range(101)], heads) == 71


def test_the_knee_scales_both_axes() -> None:
    heads = list(range(10, -1, -1))
    curve = [0.9] * 8 + [0.6, 0.3, 0.0]
    assert knee(ACCURACY, [0.5 + value / 1000 for value in curve], [12 * left for left in heads]) == 7


def test_a_curve_that_never_falls_ends_at_its_last_step() -> None:
    assert knee(ACCURACY, [0.5, 0.5, 0.6, 0.5, 0.7], [4, 3, 2, 1, 0]) == 4
    assert knee(ACCURACY, [0.5], [4]) == 0


@pytest.mark.parametrize("values", [[0.9, 0.2, 0.15, 0.1, 0.05], [1.0, 0.4, 0.2, 0.1, 0.0]])
def test_a_curve_that_falls_at_once_does_not_end_with_the_worst_model(values: list[float]) -> None:
    """No step lies above the line from the first to the last, so the two ends are the nearest to it: of these, only the
    dense model is any good."""
    assert knee(ACCURACY, values, [4, 3, 2, 1, 0]) == 0


# --- stopping, in real runs ---


@functools.cache
def data(name: str = "bert") -> tuple[list[Any], list[Any]]:
    """Calibration, and an evaluation set of which the dense model is right about everything, so that it can fall."""
    model, entry = ZOO[name].build(), ZOO[name]
    held_out = []
    for seed in range(20, 26):
        batch = labelled(entry, seed)
        with torch.no_grad():
            logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
        held_out.append({**batch, "labels": (logits - centre(name)).argmax(-1)})
    return [labelled(entry, 0), labelled(entry, 5)], held_out


@functools.cache
def centre(name: str) -> torch.Tensor:
    """The mean logits over some batches: the tiny model says the same about everything but for what lies beyond."""
    model, batches = ZOO[name].build(), [labelled(ZOO[name], seed) for seed in range(40, 60)]
    with torch.no_grad():
        actual = [model(**{k: v for k, v in b.items() if k != "labels"}).logits for b in batches]
    return torch.cat(actual).mean(0)


def telling_model(name: str = "bert") -> Any:
    model = ZOO[name].build()
    with torch.no_grad():
        model.classifier.bias -= centre(name)
    return model


# The loop of the paper, and the criterion and the repair that `prune` has by default, unit by unit.
WAYS = {
    "published": {"criterion": "gnorm", "repair": "none"},
    "defaults": {"criterion": "repair", "repair": "lstsq", "rescore": "every"},
}
both_ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def assert_is_the_model_of_its_step(
    result: Any, dense: Any, batch: Any, way: dict[str, str], calibration: list[Any]
) -> None:
    """Weights, mask and outputs are those of the dense model without the heads of the steps up to the result, each
    step compensated as the run was told to."""
    steps = result.trajectory[: result.stopped_at + 1]
    gone = [head for step in steps for head in step.removed]
    expected = copy.deepcopy(dense)
    for step in steps:
        headprune.remove(expected, step.removed, repair=way["repair"], batches=calibration)
    assert kept_heads(result.model) == kept_heads(expected)
    assert result.mask.sum() == result.result.heads == sum(len(kept) for kept in kept_heads(expected))
    assert identical(outputs(result.model, batch), outputs(expected, batch))
    if gone:
        assert difference(outputs(result.model, batch), outputs(dense, batch)) > 1e-6


@both_ways
@pytest.mark.parametrize(("keep", "left"), [(0.5, 6), (0.6, 8), (5, 5), (0, 0), (1.0, 12)])
def test_a_run_keeps_what_it_was_told(keep: float | int, left: int, way: dict[str, str]) -> None:
    calibration, held_out = data()
    model = telling_model()
    dense = copy.deepcopy(model)
    result = headprune.prune(model, calibration, keep=keep, evaluation=held_out, **way)
    assert result.model is model
    assert [step.heads for step in result.trajectory] == list(range(12, left - 1, -1))
    assert_is_the_model_of_its_step(result, dense, held_out[0], way, calibration)


@pytest.mark.parametrize(("keep", "heads"), [(10, [18, 12, 10]), (0.5, [18, 12, 10, 8])], ids=["count", "share"])
def test_a_budget_with_groups_and_several_units_per_step(keep: float | int, heads: list[int]) -> None:
    """18 heads in groups of two, three groups per step: the last step takes what the budget has left, and a share of
    nine heads, which groups cannot meet, is met by the first number below it."""
    batches = [labelled(ZOO["llama-gqa"], 0)]
    result = headprune.prune(ZOO["llama-gqa"].build(), batches, keep=keep, every=3)
    assert [step.heads for step in result.trajectory] == heads


@both_ways
@pytest.mark.parametrize("explore", [False, True])
def test_max_drop_leaves_the_last_model_above_the_floor(explore: bool, way: dict[str, str]) -> None:
    calibration, held_out = data()
    model = telling_model()
    dense = copy.deepcopy(model)
    result = headprune.prune(model, calibration, max_drop=0.35, explore=explore, evaluation=held_out, **way)
    metrics = [step.metric for step in result.trajectory]
    assert metrics[0] == 1.0
    smooth = [0.0, *IsotonicRegression().fit_transform(range(1, len(metrics)), [1.0 - m for m in metrics[1:]])]
    within = max(step for step, drop in enumerate(smooth) if drop <= 0.35)
    assert 1 < within < 12
    assert result.stopped_at == within
    assert result.rule == "max_drop 0.35"
    assert len(metrics) > within + 1  # it went on until the drop was real
    assert not explore or len(metrics) == 13
    assert_is_the_model_of_its_step(result, dense, held_out[0], way, calibration)


@both_ways
def test_the_knee_is_found_on_the_full_curve(way: dict[str, str]) -> None:
    calibration, held_out = data()
    model = telling_model()
    dense = copy.deepcopy(model)
    result = headprune.prune(model, calibration, knee=True, evaluation=held_out, **way)
    steps = result.trajectory
    assert len(steps) == 13
    drops = [steps[0].metric - step.metric for step in steps]
    heights = [n / 12 - drop / max(drops) for n, drop in enumerate(drops)]
    assert heights[result.stopped_at] == pytest.approx(max(heights))
    assert 0 < result.stopped_at < 12
    assert_is_the_model_of_its_step(result, dense, held_out[0], way, calibration)


@both_ways
def test_exploring_goes_on_but_the_model_is_the_one_at_the_stop(way: dict[str, str]) -> None:
    calibration, held_out = data()
    model = telling_model()
    dense = copy.deepcopy(model)
    far = headprune.prune(model, calibration, keep=8, explore=True, evaluation=held_out, **way)
    near = headprune.prune(copy.deepcopy(dense), calibration, keep=8, evaluation=held_out, **way)
    assert len(far.trajectory) == 13
    assert far.stopped_at == near.stopped_at == 4
    assert removal_order(far.trajectory)[:4] == removal_order(near.trajectory)
    assert_is_the_model_of_its_step(far, dense, held_out[0], way, calibration)
    assert identical(outputs(far.model, held_out[0]), outputs(near.model, held_out[0]))


@both_ways
@pytest.mark.parametrize("minimum", [1, 3])
def test_every_site_keeps_its_minimum(minimum: int, way: dict[str, str]) -> None:
    calibration, held_out = data()
    model = telling_model()
    dense = copy.deepcopy(model)
    result = headprune.prune(model, calibration, min_per_site=minimum, evaluation=held_out, **way)
    assert [len(kept) for kept in kept_heads(result.model)] == [minimum] * 3
    assert len(result.trajectory) == 12 - 3 * minimum + 1
    assert_is_the_model_of_its_step(result, dense, held_out[0], way, calibration)


def test_a_minimum_wins_over_a_budget() -> None:
    calibration, held_out = data()
    result = headprune.prune(telling_model(), calibration, keep=2, min_per_site=2, evaluation=held_out, rescore="every")
    assert [len(kept) for kept in kept_heads(result.model)] == [2, 2, 2]
    assert result.stopped_at == 6


def test_a_pruned_model_can_be_pruned_on() -> None:
    """Head ids stay the original ones, and a share is one of what is left."""
    calibration, held_out = data()
    model = headprune.remove(telling_model(), [(0, 1), (0, 2), (1, 3), (2, 0)])
    result = headprune.prune(model, calibration, keep=0.5, evaluation=held_out, rescore="every")
    assert [step.heads for step in result.trajectory] == [8, 7, 6, 5, 4]
    gone = {head for step in result.trajectory for head in step.removed}
    assert gone.isdisjoint({(0, 1), (0, 2), (1, 3), (2, 0)})


def test_the_dense_model_is_kept_if_asked() -> None:
    calibration, held_out = data()
    model = telling_model()
    before = outputs(model, held_out[0])
    result = headprune.prune(model, calibration, keep=6, evaluation=held_out, keep_dense=True)
    assert identical(before, outputs(result.dense, held_out[0]))
    assert headprune.prune(telling_model(), calibration, keep=11, evaluation=held_out).dense is None


def test_no_batches() -> None:
    with pytest.raises(DataError, match="no calibration batches; give at least one"):
        headprune.prune(ZOO["bert"].build(), [])


def test_a_count_that_is_too_large_changes_nothing() -> None:
    calibration, _ = data()
    model = ZOO["bert"].build()
    with pytest.raises(ScheduleError, match="has 12 heads, so 99 cannot be kept"):
        headprune.prune(model, calibration, keep=99)
    assert [len(kept) for kept in kept_heads(model)] == [4, 4, 4]
