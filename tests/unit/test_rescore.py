"""How often a greedy run scores again, and that it is the same after a kill at any step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import headprune
from headprune.errors import ScheduleError
from headprune.measure.trajectory import Step
from headprune.search import rescore
from headprune.search.config import PruneConfig
from headprune.search.pruner import Pruner
from headprune.units import Member
from scoring import labelled
from zoo import ZOO

SITES, HEADS = 4, 8


def batches(*seeds: int) -> list[Any]:
    return [labelled(ZOO["bert"], seed) for seed in seeds]


def made_step(number: int, removed: Sequence[Member], left: int, scores: torch.Tensor | None) -> Step:
    units = {"heads": left}
    return Step(number, tuple(removed), None, 1.0, None, None, units, units, 0, 0, scores)


def scored_at(word: str, scores: Callable[[int], torch.Tensor], every: int = 1) -> list[int]:
    """Steps of a run without a model that score again, the scores of step n being these."""
    left = SITES * HEADS
    steps, gone = [made_step(0, (), left, None)], torch.zeros(SITES, HEADS, dtype=torch.bool)
    fresh, known = [], torch.empty(0)
    while left:
        number = len(steps)
        if rescore.is_due(word, steps):
            fresh.append(number)
            known = scores(number)
        known = known.masked_fill(gone, torch.nan)
        order = sorted((~gone).nonzero().tolist(), key=lambda place: float(known[tuple(place)]))[:every]
        for place in order:
            gone[tuple(place)] = True
        left -= len(order)
        steps.append(made_step(number, [Member(*place) for place in order], left, known))
    return fresh


ORDER = torch.arange(SITES * HEADS, dtype=torch.float64).view(SITES, HEADS)


def drawn(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.rand(SITES, HEADS, generator=generator, dtype=torch.float64)


def test_every_step_or_every_nth() -> None:
    assert scored_at("every", drawn) == list(range(1, 33))
    assert scored_at("1", drawn) == list(range(1, 33))
    assert scored_at("5", drawn) == [1, 6, 11, 16, 21, 26, 31]
    assert scored_at("100", drawn) == [1]


def test_scores_that_never_move_are_computed_ever_less_often() -> None:
    """Intervals double, 1, 2, 4, but never beyond a quarter of what is left: before step 13 that is 5 of 20."""
    assert scored_at("auto", lambda number: ORDER) == [1, 2, 4, 8, 13, 17, 20, 22, 24, 26, 27, 28, 29, 30, 31, 32]


def test_scores_that_turn_round_are_computed_at_every_step() -> None:
    assert scored_at("auto", lambda number: ORDER if number % 2 else -ORDER) == list(range(1, 33))


def test_scores_that_turn_round_once_shorten_the_interval_again() -> None:
    calm = scored_at("auto", lambda number: ORDER)
    turned = scored_at("auto", lambda number: ORDER if number < 8 else -ORDER)
    assert turned[:4] == calm[:4] == [1, 2, 4, 8]
    assert turned[4] == 10, "4 had been agreed on at step 4; at step 8 nothing agrees, and half of that is 2"


def test_units_per_step_count() -> None:
    """With two per step a quarter of what is left is half as many steps."""
    assert scored_at("auto", lambda number: ORDER, every=2) == [1, 2, 4, 6, 8, 10, 11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize("word", ["every", "auto", "3", 3])
def test_ways_to_score_again(word: Any) -> None:
    assert PruneConfig(rescore=word).rescore == str(word)
    assert PruneConfig(rescore=word).settings()["rescore"] == str(word)


@pytest.mark.parametrize("word", ["", "0", 0, -1, "2.5", "often", "²"])
def test_what_is_no_way_to_score_again(word: Any) -> None:
    with pytest.raises(ScheduleError, match="use 'every', 'auto' or a number of steps"):
        PruneConfig(rescore=word)


@pytest.mark.parametrize("options", [{"schedule": "one-shot"}, {"keep_flops": 0.5}, {"units": "neurons"}])
def test_only_greedy_runs_of_heads_score_again(options: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError, match="rescore goes with greedy runs that remove heads"):
        PruneConfig(rescore="auto", **options)
    assert PruneConfig(**options).rescore == "every"


def lines(steps: Sequence[Step]) -> list[str]:
    return [json.dumps(step.to_json()) for step in steps]


@pytest.mark.parametrize("evaluated", [True, False])
def test_steps_in_between_follow_the_last_scores(evaluated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    compute = headprune.search.pruner.score
    monkeypatch.setattr(headprune.search.pruner, "score", lambda *a, **k: passes.append(1) or compute(*a, **k))
    evaluation = batches(2) if evaluated else None
    result = headprune.prune(ZOO["bert"].build(), batches(0, 1), evaluation=evaluation, rescore=4)
    steps = result.trajectory
    assert len(steps) == 13
    assert len(passes) == 3
    for step in steps[1:]:
        known = steps[(step.step - 1) // 4 * 4 + 1].scores
        gone = [member for earlier in steps[: step.step] for member in earlier.removed]
        expected = known.clone()
        for member in gone:
            expected[member] = torch.nan
        assert torch.equal(step.scores.nan_to_num(-1), expected.nan_to_num(-1))
        assert step.score == expected[~expected.isnan()].min()


def test_repairs_do_not_depend_on_where_scores_came_from() -> None:
    """With scores that the weights alone decide for each head, and no repair that changes them, no score ever moves."""
    options: dict[str, Any] = {"criterion": "random", "evaluation": batches(2), "compensate": "lstsq"}
    every, rarely = (headprune.prune(ZOO["bert"].build(), batches(0, 1), rescore=word, **options) for word in ("1", 5))
    assert lines(every.trajectory) == lines(rarely.trajectory)


@pytest.mark.parametrize(("word", "criterion", "every"), [("auto", "residual-gradient", 2), ("2", "magnitude", 3)])
def test_a_run_that_was_killed_goes_on_byte_for_byte(word: str, criterion: str, every: int) -> None:
    config = PruneConfig(rescore=word, criterion=criterion, every=every)

    def run(known: Sequence[Step] = ()) -> list[str]:
        pruner = Pruner(ZOO["bert"].build(), batches(0, 1), config, evaluation=batches(2), known=known)
        return lines(list(pruner) and pruner.steps)

    whole = run()
    for kept in range(1, len(whole)):
        assert run([Step.from_json(json.loads(line)) for line in whole[:kept]]) == whole
