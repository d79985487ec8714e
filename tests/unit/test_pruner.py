"""One step at a time: what a pruner tells, how it is stopped and goes on, and what is left when it fails."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune
from headprune.errors import DataError, ReplayError, ScheduleError
from headprune.measure.trajectory import Step
from headprune.run_folder import Run
from headprune.runs.experiment import Experiment, settings_of
from headprune.search.config import PruneConfig, config_from
from headprune.search.observers import Observer
from headprune.search.pruner import Pruner
from headprune.search.settings import command_words, migrated
from helpers import assert_unchanged, identical, kept_heads, outputs, state_of
from run_helpers import headprune as program
from run_helpers import material, prune_command, removal_order, steps_of
from score_helpers import labelled
from zoo import ZOO


def batches() -> list[Any]:
    return [labelled(ZOO["bert"], 0), labelled(ZOO["bert"], 1)]


class Watching(Observer):
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.again: list[Step] = []
        self.seconds: list[Any] = []

    def step(self, step: Step, seconds: Any) -> None:
        self.steps.append(step)
        self.seconds.append(seconds)

    def replayed(self, step: Step) -> None:
        self.again.append(step)


def test_a_pruner_takes_one_step_at_a_time() -> None:
    model, watching = ZOO["bert"].build(), Watching()
    pruner = Pruner(model, batches(), PruneConfig(keep=8, rescore="every"), observers=[watching])
    assert next(pruner).step == 0
    assert sum(len(kept) for kept in kept_heads(model)) == 12
    seen = [(step.step, step.heads, sum(len(kept) for kept in kept_heads(model))) for step in pruner]
    assert seen == [(1, 11, 11), (2, 10, 10), (3, 9, 9), (4, 8, 8)]
    assert [step.step for step in watching.steps] == [0, 1, 2, 3, 4]
    assert all(set(seconds) == {"seconds", "scoring"} for seconds in watching.seconds)
    assert pruner.decide().rule == "keep 8"
    whole = headprune.prune(ZOO["bert"].build(), batches(), keep=8, rescore="every")
    assert removal_order(whole.trajectory) == removal_order(pruner.steps)


def test_a_pruner_can_be_stopped_and_goes_on() -> None:
    config = PruneConfig(keep=6, rescore="every")
    first = Pruner(ZOO["bert"].build(), batches(), config)
    for step in first:
        if step.step == 2:
            first.stop()
    assert len(first.steps) == 3
    watching = Watching()
    second = Pruner(ZOO["bert"].build(), batches(), config, known=first.steps, observers=[watching])
    told = list(second)
    assert [step.step for step in watching.again] == [0, 1, 2]
    assert [step.step for step in told] == [2, 3, 4, 5, 6]  # where it is, and what is new
    whole = headprune.prune(ZOO["bert"].build(), batches(), config=config)
    assert [step.to_json() for step in second.steps] == [step.to_json() for step in whole.trajectory]


# --- what is left when something goes wrong ---


@pytest.mark.parametrize("repair", ["none", "lstsq"])
def test_an_error_in_the_middle_leaves_the_model_as_it_was(repair: Any) -> None:
    model = ZOO["bert"].build()
    expected, before = outputs(model, batches()[0]), state_of(model)

    def fail(step: Step) -> None:
        if step.step == 3:
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        headprune.prune(model, batches(), keep=4, repair=repair, on_step=fail)
    assert_unchanged(model, before)
    assert identical(outputs(model, batches()[0]), expected)


def test_an_interruption_leaves_the_model_as_it_was() -> None:
    model = ZOO["llama-gqa"].build()
    before = state_of(model)

    def interrupt(step: Step) -> None:
        if step.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        headprune.prune(model, [labelled(ZOO["llama-gqa"], 0)], on_step=interrupt)
    assert_unchanged(model, before)


def test_a_model_put_back_can_be_pruned_again() -> None:
    """What an undo gives back is not what the next removal writes into."""
    model = ZOO["bert"].build()
    first = headprune.prune(model, batches(), keep=9, explore=True, rescore="every")
    again = headprune.prune(ZOO["bert"].build(), batches(), keep=9, rescore="every")
    assert kept_heads(model) == kept_heads(again.model)
    assert identical(outputs(model, batches()[0]), outputs(again.model, batches()[0]))
    assert len(first.trajectory) == 13


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"rescore": "every"}, 5),
        ({"keep_flops": 0.6, "rounds": 3}, 3),
        ({"keep_flops": 0.6, "rounds": 3, "repair": "none"}, 3),
        ({"keep_flops": 0.6, "rounds": 3, "repair": "lstsq"}, 3),
    ],
    ids=["greedy", "rounds", "rounds-unrepaired", "rounds-by-site"],
)
def test_sites_are_resolved_once_a_step(options: dict[str, Any], steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step, and when the units of a step have gone; all else is handed on."""
    model, surveyed = ZOO["bert"].build(), list[Any]()
    module: Any = importlib.import_module("headprune.units.resolve")  # whose name is that of a function, too
    read = module.attention_sites
    monkeypatch.setattr(module, "attention_sites", lambda own, family: (surveyed.append(own), read(own, family))[1])
    evaluation = [labelled(ZOO["bert"], 2)]
    pruner = Pruner(model, [labelled(ZOO["bert"], 0)], PruneConfig(**options), evaluation=evaluation)
    next(pruner)
    for _ in range(steps):
        surveyed.clear()
        next(pruner)
        assert [own for own in surveyed if own is model] == [model]


@pytest.mark.parametrize("repair", ["dense", "lstsq", "none"])
def test_layers_are_resolved_when_they_begin_and_after_each_removal(
    repair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, surveyed = ZOO["bert"].build(), list[Any]()
    module: Any = importlib.import_module("headprune.units.resolve")
    read = module.attention_sites
    config = PruneConfig(schedule="layerwise", keep_flops=0.6, repair=repair)
    pruner = Pruner(model, [labelled(ZOO["bert"], 0)], config, evaluation=[labelled(ZOO["bert"], 2)])
    next(pruner)
    monkeypatch.setattr(module, "attention_sites", lambda own, family: (surveyed.append(own), read(own, family))[1])
    step = next(pruner)
    layers, changed = model.config.num_hidden_layers, len({site for site, _ in step.removed})
    assert [own for own in surveyed if own is model] == [model] * (layers + changed + 1)


# --- a journal that does not fit ---


def test_a_replayed_repair_must_do_what_the_journal_says() -> None:
    model = ZOO["bert"].build()
    steps = headprune.prune(copy.deepcopy(model), batches(), keep=8, rescore="every").trajectory
    Pruner(copy.deepcopy(model), batches()).replay(steps)  # as it was written
    (repair,) = steps[2].repairs
    wrong = {**repair, "error": repair["error"] + 0.01 * repair["error_without"]}
    changed = [*steps[:2], dataclasses.replace(steps[2], repairs=(wrong,)), *steps[3:]]
    with pytest.raises(ReplayError, match=r"Step 2 cannot be repeated: at site \d"):
        Pruner(copy.deepcopy(model), batches()).replay(changed)
    other = {**repair, "kind": "mean"}
    changed = [*steps[:2], dataclasses.replace(steps[2], repairs=(other,)), *steps[3:]]
    with pytest.raises(ReplayError, match=r"Step 2 .* the journal has mean"):
        Pruner(copy.deepcopy(model), batches()).replay(changed)


def test_other_data_is_found_out_when_a_run_goes_on() -> None:
    steps = headprune.prune(ZOO["bert"].build(), batches(), keep=8).trajectory
    others = [labelled(ZOO["bert"], 5), labelled(ZOO["bert"], 6)]
    with pytest.raises(ReplayError, match="Step 1 cannot be repeated"):
        Pruner(ZOO["bert"].build(), others).replay(steps)


# --- one configuration ---


def test_a_config_is_declared_once() -> None:
    """Every field is an option of `prune`, a setting of a run, a keyword of Python, and a word of the command. Memory
    alone is no setting: it changes nothing in a run, and may be another when it goes on."""
    names = {field.name for field in dataclasses.fields(PruneConfig)}
    said = program("prune", "--help").out
    for field in dataclasses.fields(Experiment):
        if field.name not in ("model",):
            flag = field.metadata["flag"] or f"--{field.name.replace('_', '-')}"
            assert flag[:22] in said, field.name
    m = material()
    assert names - set(settings_of(Experiment(model=m.bert, data=m.data_csv))) == {"memory"}
    changed = Experiment(
        model=m.bert, data=m.data_csv, every=3, knee=True, seed=5, criterion="hies(alpha=0.7)", keep=0.5
    )
    words = command_words(changed.settings())
    assert words[:5] == ["headprune", "prune", m.bert, "--data", m.data_csv]
    assert " ".join(words[5:]) == "--criterion hies(alpha=0.7) --every 3 --keep 0.5 --knee --seed 5"


def test_the_command_of_a_run_repeats_it(tmp_path: Path) -> None:
    m = material()
    program(*prune_command(m.bert, m.data_csv, tmp_path / "one", "--keep", "10", "--every", "2", "--same-data"))
    words = command_words(headprune_settings(tmp_path / "one"))
    assert program(*words[1:], "--out", tmp_path / "two").code == 0
    assert steps_of(tmp_path / "one") == steps_of(tmp_path / "two")


def headprune_settings(folder: Path) -> Any:
    from headprune.run_folder import read_run

    return read_run(folder)[0]["settings"]


def test_a_config_refuses_what_makes_no_sense_before_anything_runs() -> None:
    for wrong in ({"schedule": "lazy"}, {"every": 0}, {"keep": 2.0}, {"max_drop": -1}, {"labels": "none"}):
        with pytest.raises((ScheduleError, DataError)):
            PruneConfig(**wrong)  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        PruneConfig().every = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        PruneConfig("gnorm")  # type: ignore[call-arg]


def test_options_that_are_none_of_its_own_are_the_criterions() -> None:
    made = config_from({"criterion": "hies", "alpha": 0.25, "keep": 3})
    assert (str(made.criterion), made.keep) == ("hies(alpha=0.25)", 3)
    result = headprune.prune(ZOO["bert"].build(), batches(), criterion="hies", alpha=0.25, keep=11)
    assert result.result.heads == 11


def test_settings_of_earlier_versions_are_read() -> None:
    old = {"model": "m", "data": "d", "criterion": "repair", "columns": {"text": "t", "pair": None, "label": None}}
    now = migrated(old)
    assert (now["criterion"], now["text_column"], now["repair"]) == ("residual-gradient", "t", "none")
    assert migrated({**old, "criterion": "random(seed=0)"})["criterion"] == "random"
    assert migrated({**old, "criterion": "a-plugins-own"})["criterion"] == "a-plugins-own"


def test_a_run_is_an_observer(tmp_path: Path) -> None:
    model = ZOO["bert"].build()
    with Run(tmp_path / "run", {"by": "hand"}) as run:
        for _ in Pruner(model, batches(), PruneConfig(keep=10), observers=[run]):
            pass
        assert [step.step for step in run.steps] == [0, 1, 2]
    assert len(steps_of(tmp_path / "run")) == 3


# --- what is printed ---


def test_a_result_is_a_line_and_not_pages() -> None:
    result = headprune.prune(ZOO["bert"].build(), batches(), keep=8, max_drop=0.9, rescore="every")
    assert repr(result).startswith("<PruneResult: 4 of 12 heads removed, accuracy ")
    assert repr(result).endswith("stopped at step 4 of 4 by keep 8>")
    assert len(repr(result)) < 200
    assert len(repr(headprune.score(ZOO["bert"].build(), batches()))) < 200


def test_half_precision_is_said(caplog: pytest.LogCaptureFixture) -> None:
    headprune.score(ZOO["bert"].build().bfloat16(), batches(), criterion="gnorm")
    assert "computes in bfloat16, so scores and losses are rough; load it with dtype=torch.float32" in caplog.text
    caplog.clear()
    headprune.score(ZOO["bert"].build(), batches(), criterion="gnorm")
    assert caplog.text == ""


# --- batches that no model takes ---

WRONG = {
    "a row": ({"input_ids": torch.tensor([5, 6, 7])}, "has no axis for samples"),
    "label alone": ({"input_ids": torch.ones(2, 3).long(), "label": torch.tensor([0, 1])}, 'take "labels"'),
    "counts": ({"input_ids": torch.ones(2, 3).long(), "labels": torch.tensor([0])}, "different numbers of samples"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("verb", ["score", "prune"])
def test_batches_that_are_none_are_refused_with_a_sentence(case: str, verb: str) -> None:
    batch, message = WRONG[case]
    with pytest.raises(DataError, match=message):
        getattr(headprune, verb)(ZOO["bert"].build(), [batch])
