"""How often a greedy run scores again, and that it is the same after a kill at any step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune
from headprune.criteria.scoring_pass import ScoringPass
from headprune.errors import RunError, ScheduleError
from headprune.measure.trajectory import Step
from headprune.runs.experiment import run_experiment
from headprune.search import rescore
from headprune.search.config import Experiment, PruneConfig
from headprune.search.pruner import Pruner
from headprune.search.settings import command_words
from headprune.search.step_rule import StepRule
from headprune.units import Member, Site
from headprune.units.spec import ForwardNeeds
from run_helpers import material
from score_helpers import labelled
from zoo import ZOO

SITES, HEADS = 4, 8
EMPTIABLE = ForwardNeeds(empty="nothing")


def batches(*seeds: int) -> list[Any]:
    return [labelled(ZOO["bert"], seed) for seed in seeds]


def made_step(number: int, removed: Sequence[Member], left: int, scores: torch.Tensor | None) -> Step:
    units = {"heads": left}
    return Step(number, tuple(removed), None, 1.0, None, None, units, units, 0, 0, scores)


def made_sites(gone: torch.Tensor) -> list[Any]:
    kept = [[head for head in range(HEADS) if not gone[site, head]] for site in range(SITES)]
    units = {"width": 1, "group": 1, "original": HEADS}
    return [
        Site(kind="neurons", index=site, path=f"{site}", o=f"{site}.o", kept=tuple(heads), needs=EMPTIABLE, **units)
        for site, heads in enumerate(kept)
    ]


def run_of(
    word: str, scores: Callable[[int], torch.Tensor], every: int = 1, *, ahead: bool = False
) -> list[tuple[bool, list[Member]]]:
    """The steps of a run without a model, the scores of step n being these: whether it scored, and who left. With
    `ahead` the scores of a site that has lost something are known, and they are what they were."""
    rule = StepRule(every=every)
    steps, gone = [made_step(0, (), SITES * HEADS, None)], torch.zeros(SITES, HEADS, dtype=torch.bool)
    taken, known = [], torch.empty(0)

    def without(site: Any, lost: Sequence[int]) -> torch.Tensor | None:
        return known[site.index, [head for head in site.kept if head not in lost]] if ahead else None

    while not gone.all():
        due = rescore.is_due(word, steps)
        known = (scores(len(steps)) if due else known).masked_fill(gone, torch.nan)
        sites = made_sites(gone)
        if word == "auto":
            removed = rescore.choose_together(rule, steps, known, sites, without, None)
        else:
            removed = rule.choose(known, sites)
        for member in removed:
            gone[member] = True
        taken.append((due, removed))
        steps.append(made_step(len(steps), removed, int((~gone).sum()), known))
    return taken


def scored_at(word: str, scores: Callable[[int], torch.Tensor]) -> list[int]:
    return [number for number, (due, _) in enumerate(run_of(word, scores), start=1) if due]


def counts(scores: Callable[[int], torch.Tensor], every: int = 1, *, ahead: bool = False) -> list[int]:
    """How many units leave at once by `auto`."""
    return [len(removed) for _, removed in run_of("auto", scores, every, ahead=ahead)]


# Scores that rise so steeply that all lower ones together are less than a hundredth of the next, head by head over the
# sites, so that neighbours in the order stand at different sites.
ORDER = (1000.0 ** torch.arange(SITES * HEADS, dtype=torch.float64)).view(HEADS, SITES).t()


def drawn(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.rand(SITES, HEADS, generator=generator, dtype=torch.float64)


def test_every_step_or_every_nth() -> None:
    assert scored_at("every", drawn) == list(range(1, 33))
    assert scored_at("1", drawn) == list(range(1, 33))
    assert scored_at("5", drawn) == [1, 6, 11, 16, 21, 26, 31]
    assert scored_at("100", drawn) == [1]


def test_scores_that_never_move_let_ever_more_go_at_once() -> None:
    """The number doubles, 1, 2, 4, 8, and is never more than a third of what is left: 5 of 17."""
    assert counts(lambda number: ORDER, ahead=True) == [1, 2, 4, 8, 5, 4, 2, 2, 1, 1, 1, 1]


def test_they_leave_in_the_order_of_their_scores() -> None:
    order = [member for _, removed in run_of("auto", lambda number: ORDER, ahead=True) for member in removed]
    assert order == [Member(number % SITES, number // SITES) for number in range(SITES * HEADS)]


def test_a_site_whose_scores_are_not_known_any_more_ends_it() -> None:
    """One of each of the four sites, and then the first of them is due again."""
    assert counts(lambda number: ORDER) == [1, 2, 4, 4, 4, 4, 4, 3, 2, 1, 1, 1, 1]
    assert counts(lambda number: ORDER.t().reshape(SITES, HEADS))[:7] == [1] * 7  # all of them stand at one site


def test_scores_ahead_decide_who_is_next() -> None:
    """What is left of a site that has lost a unit becomes dear, and others go first."""
    sites, known = made_sites(torch.zeros(SITES, HEADS, dtype=torch.bool)), ORDER.t().reshape(SITES, HEADS)
    steps = [made_step(0, (), SITES * HEADS, None), *(made_step(n, (), SITES * HEADS, known) for n in range(1, 4))]

    def dear(site: Any, lost: Sequence[int]) -> torch.Tensor:
        return torch.full((HEADS - len(lost),), 10 * float(known.max()), dtype=torch.float64)

    removed = rescore.choose_together(StepRule(), steps, known, sites, dear, None)
    assert removed == [Member(site, 0) for site in range(SITES)]  # and then all that is left is dear


def test_scores_that_turn_round_let_one_go_at_a_time() -> None:
    assert counts(lambda number: ORDER if number % 2 else 1 / ORDER, ahead=True) == [1] * 32


def test_scores_that_turn_round_once_halve_the_number() -> None:
    turned = counts(lambda number: ORDER if number < 4 else ORDER.flip(0, 1), ahead=True)
    assert turned[:4] == [1, 2, 4, 2], "4 had been agreed on at step 3; at step 4 nothing agrees, and half of that is 2"


def test_scores_that_are_alike_let_few_go_at_a_time() -> None:
    """Where no unit is a small part of all, none goes with others: 2 of 32 alike are the most within 8 %."""
    taken = counts(lambda number: torch.ones(SITES, HEADS, dtype=torch.float64), ahead=True)
    assert max(taken) == 2
    assert taken[-20:] == [1] * 20


def test_scores_below_zero_have_no_shares() -> None:
    """Those of an order turned round: as many go as without `auto`."""
    assert counts(lambda number: -1 / ORDER, ahead=True) == [1] * 32
    assert counts(lambda number: -1 / ORDER, every=2, ahead=True) == [2] * 16


def test_units_that_go_together_are_compared_as_units() -> None:
    """Groups of four: of the four lowest units, one is the same. Of their members the lowest four all are."""
    sites = [replace(site, group=4) for site in made_sites(torch.zeros(SITES, HEADS, dtype=torch.bool))]
    old = torch.arange(SITES * HEADS, dtype=torch.float64).view(SITES, HEADS) // 4
    new = torch.where(old == 0, old, 7 - old)
    step = made_step(1, (), SITES * HEADS, old)
    assert rescore._update_trust(2, step, new, sites, 1) == 1
    assert rescore._update_trust(2, step, old, sites, 1) == 4


def test_a_target_is_not_overshot() -> None:
    sites = made_sites(torch.zeros(SITES, HEADS, dtype=torch.bool))
    steps = [made_step(0, (), SITES * HEADS, None), *(made_step(n, (), SITES * HEADS, ORDER) for n in range(1, 6))]
    for most in (1, 3, 5):
        assert len(rescore.choose_together(StepRule(), steps, ORDER, sites, lambda site, lost: None, most)) == min(
            most, SITES
        )


def test_units_per_step_count() -> None:
    """With two per step there are twice as many at once: 2, 4, 8, and a third of what is left in twos."""
    assert counts(lambda number: ORDER, every=2, ahead=True) == [2, 4, 8, 6, 4, 2, 2, 2, 2]


@pytest.mark.parametrize("word", ["every", "auto", "3", 3])
def test_ways_to_score_again(word: Any) -> None:
    assert PruneConfig(rescore=word).rescore == str(word)
    assert PruneConfig(rescore=word).settings()["rescore"] == str(word)


@pytest.mark.parametrize("word", ["", "0", 0, -1, "2.5", "often", "²"])
def test_what_is_no_way_to_score_again(word: Any) -> None:
    with pytest.raises(ScheduleError, match="rescore takes 'every', 'auto' or a number of steps"):
        PruneConfig(rescore=word)


@pytest.mark.parametrize("options", [{"schedule": "one-shot"}, {"keep_flops": 0.5}, {"units": "neurons"}])
def test_only_greedy_runs_of_heads_score_again(options: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError, match="rescore goes with greedy runs that remove heads"):
        PruneConfig(rescore="auto", **options)
    assert PruneConfig(**options).rescore == "every"


OURS = ["residual-gradient", "residual-gradient(residual=False)", "residual-error", "elimination"]


@pytest.mark.parametrize("criterion", ["gnorm", "his", "hies", "entropy", "fisher", "magnitude", "random", *OURS])
def test_by_default_our_criteria_take_several_at_once_and_published_ones_do_not(criterion: str) -> None:
    config = PruneConfig(criterion=criterion)
    assert config.settings()["rescore"] == config.rescore == ("auto" if criterion in OURS else "every")
    assert config.with_options(criterion="gnorm").rescore == "every"
    assert PruneConfig(criterion=criterion, rescore="every").settings()["rescore"] == "every"


def test_the_default_is_not_written_into_commands() -> None:
    for criterion in ("residual-gradient", "gnorm"):
        experiment = Experiment(model="m", data="d", criterion=criterion)
        assert "--rescore" not in command_words(experiment.settings())
        other = experiment.with_options(rescore="every" if experiment.rescore == "auto" else "auto")
        assert command_words(other.settings())[-2:] == ["--rescore", other.rescore]
    assert "--rescore" not in command_words(experiment.with_options(rescore="every").settings(), "compare")


def test_a_run_that_an_earlier_version_began_goes_on_as_it_began(tmp_path: Path) -> None:
    data = {"model": material().bert, "data": material().data_csv, "calibration_samples": 10, "batch_size": 4}
    whole, out = tmp_path / "whole", tmp_path / "out"
    for folder, rules in ((whole, {"keep": 0}), (out, {"keep": 6})):
        run_experiment(Experiment(**data, rescore="every", **rules), folder, measure=False, publish=False)
    for written in (True, False):
        record = json.loads((out / "run.json").read_text())
        if not written:  # by a version in which there was no other way
            del record["settings"]["rescore"]
            (out / "run.json").write_text(json.dumps(record))
        run_experiment(Experiment(**data, keep=0 if written else 5), out, measure=False, publish=False)
        steps = (out / "steps.jsonl").read_text().splitlines()
        assert steps[:6] == (whole / "steps.jsonl").read_text().splitlines()[:6]
    asked = Experiment(**data, rescore="auto", keep=0)
    with pytest.raises(RunError, match="rescore was"):
        run_experiment(asked, out, measure=False, publish=False)


def lines(steps: Sequence[Step]) -> list[str]:
    return [json.dumps(step.to_json()) for step in steps]


@pytest.mark.parametrize("evaluated", [True, False])
def test_steps_in_between_follow_the_last_scores(evaluated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    run = ScoringPass.run
    monkeypatch.setattr(ScoringPass, "run", lambda *a, **k: passes.append(1) or run(*a, **k))
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
    options: dict[str, Any] = {"criterion": "random", "evaluation": batches(2), "repair": "lstsq"}
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


@pytest.mark.parametrize("first", [9, 8, 7])
def test_a_run_goes_further_as_if_it_had_never_stopped(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a budget ended in the middle of a step, that step is taken again."""
    for name, limit in {
        "SCORE_SHARE": 1.0,
        "ALIKE": 0.0,
        "SHARE": 2,
    }.items():  # so that 1, 2, 4, 2, 1 go, to the last two
        monkeypatch.setattr(rescore, name, limit)

    def run(keep: int, out: Path) -> list[str]:
        data = {"model": material().bert, "data": material().data_csv, "calibration_samples": 10}
        run_experiment(Experiment(**data, batch_size=4, keep=keep, rescore="auto"), out, measure=False, publish=False)
        return (out / "steps.jsonl").read_text().splitlines()

    run(first, tmp_path / "on")
    assert run(2, tmp_path / "on") == run(2, tmp_path / "whole")
