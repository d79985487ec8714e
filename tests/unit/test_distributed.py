"""Several processes do what one does: the same removals, the same scores, whoever dies on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune
from headprune import distributed
from headprune.criteria import make
from headprune.criteria.scoring_pass import ScoringPass
from headprune.errors import NonFiniteError
from headprune.runs.experiment import Experiment, run_experiment
from headprune.search.pruner import Pruner
from headprune.signals import tokens
from headprune.signals.reached_sites import unreached_sites
from headprune.tasks import own_batches, task_of
from headprune.units import all_sites
from launch_processes import commanded, together
from run_helpers import environment, interrupt, material, steps_of
from task_models import CASES, with_classes
from zoo import ZOO, text_batch

COUNTS = (2, 4)
# Criteria that sum, that sum after a fit, that gather columns, that gather tokens, and that look at weights alone.
CRITERIA = ["his", "gnorm", "hies", "residual-gradient", "residual-error", "wanda", "elimination", "magnitude"]


GREEDY = {"calibration_samples": 10, "batch_size": 3, "keep": 5}
BUDGET = {"units": "heads,neurons", "keep_parameters": 0.9, "rounds": 2, "calibration_samples": 10, "batch_size": 3}


def experiment(**options: Any) -> Experiment:
    files = material()
    return Experiment(model=files.bert, data=files.data_csv, **options)


def pruned(count: int, *runs: tuple[Path, Mapping[str, Any]]) -> None:
    """Take runs to their end, or on from where they are, in so many processes."""
    asked = [(experiment(**how), out) for out, how in runs]  # which makes the model and the data, once

    def work(number: int) -> list[Any]:
        distributed.start()
        return [run_experiment(one, out, measure=False, publish=False)["result"] for one, out in asked]

    actual = together(count, work)
    assert [code for code, _, _ in actual] == [0] * count, actual
    assert all(result == actual[0][1] for _, result, _ in actual)


def batches() -> list[dict[str, torch.Tensor]]:
    made = with_classes(text_batch)
    return [made(seed) for seed in range(5)]


def same_trajectory(one: Path, other: Path) -> None:
    ours, theirs = steps_of(one), steps_of(other)
    assert len(ours) > 2
    assert [step["removed"] for step in ours] == [step["removed"] for step in theirs]
    for own, step in zip(ours, theirs, strict=True):
        assert own["metric"] == pytest.approx(step["metric"], rel=1e-6)
        values = [value for row in own["scores"] or () for value in row]
        others = [value for row in step["scores"] or () for value in row]
        assert [value is None for value in values] == [value is None for value in others]
        known = [value for value in values if value is not None]
        assert known == pytest.approx([value for value in others if value is not None], rel=1e-6)


# --- who does what ---------------------------------------------------------------------------------------------------


def test_one_process_goes_over_everything_and_starts_nothing() -> None:
    assert not distributed.is_distributed()
    assert distributed.is_main()
    assert distributed.all_gather(3) == [3]
    assert distributed.broadcast("it") == "it"
    stream = iter(batches())
    numbered = own_batches(stream)
    assert next(numbered).number == 0
    assert next(stream) is not None
    assert [first for _, first, _ in own_batches(batches())] == [0, 3, 6, 9, 12]
    distributed.start()
    assert not torch.distributed.is_initialized()


def test_work_is_shared_out_evenly() -> None:
    def work(number: int) -> Any:
        distributed.start()
        costs = [5.0, 1.0, 4.0, 2.0, 3.0, 1.0]
        with distributed.local_only():
            assert distributed.my_share(costs) == [0, 1, 2, 3, 4, 5]
            assert distributed.all_gather(number) == [number]
        return (
            distributed.shares(costs),
            distributed.my_share(costs),
            distributed.all_gather(number),
            distributed.broadcast(number),
            _error(number),
        )

    def _error(number: int) -> str:
        try:
            with distributed.fail_together():
                if number == 1:
                    raise NonFiniteError("It is not a number.")
        except NonFiniteError as error:
            return str(error)
        return "none"

    actual = together(2, work)
    assert [code for code, _, _ in actual] == [0, 0], actual
    whose, own, gathered, told, _ = actual[1][1]
    assert whose == actual[0][1][0]
    assert {whose[piece] for piece in own} == {1}
    loads = [
        sum(cost for cost, one in zip([5, 1, 4, 2, 3, 1], whose, strict=True) if one == number) for number in (0, 1)
    ]
    assert loads == [8, 8]
    assert gathered == [0, 1]
    assert told == 0
    assert [one[1][4] for one in actual] == ["It is not a number."] * 2  # an error of one is an error of all


# --- scores ----------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_one_process() -> None:
    data = batches()

    def scored() -> Any:
        model = ZOO["bert"].build().eval()
        heads = headprune.score(model, data, criteria=CRITERIA)
        both = headprune.score(model, data, criterion="elimination", units="heads,neurons")
        swapped = headprune.prune(
            model, data, criterion="fisher(rearrange=true)", keep_flops=0.8, units="heads,neurons", rounds=1
        )
        return heads, both, [step.removed for step in swapped.trajectory]

    def work(number: int) -> Any:
        distributed.start()
        heads, both, removed = scored()
        seen = (heads.samples, heads.tokens, heads.loss, heads.predictions, heads.zero_probabilities)
        return heads.scores, both.scores, removed, seen, [number for number, _, _ in own_batches(data)]

    heads, both, removed = scored()
    for count in (2, 6):  # of which one has nothing to do
        actual = together(count, work)
        assert [code for code, _, _ in actual] == [0] * count, actual
        assert sorted(number for _, given, _ in actual for number in given[4]) == list(range(5))
        assert max(len(given[4]) for _, given, _ in actual) == -(-5 // count)
        for _, (scores, scores_of_both, gone, (samples, real, loss, predictions, zeros), _), _ in actual:
            for name in CRITERIA:
                torch.testing.assert_close(scores[name], heads.scores[name], rtol=1e-6, atol=0, equal_nan=True)
            torch.testing.assert_close(scores_of_both, both.scores, rtol=1e-6, atol=0, equal_nan=True)
            assert gone == removed
            assert (samples, real) == (heads.samples, heads.tokens)
            assert loss == pytest.approx(heads.loss, rel=1e-12)
            assert torch.equal(predictions, heads.predictions)
            torch.testing.assert_close(zeros, heads.zero_probabilities)


def test_a_site_that_one_process_reaches_is_reached_in_all() -> None:
    """The only sample with an image is in one share, so that the other process sees no vision site run."""
    llava = next(case for case in CASES if case.id == "image-text-to-text-llava")
    image, text = llava.batch(0), llava.batch(1)
    text = {name: value for name, value in text.items() if name != "pixel_values"}
    text["input_ids"] = text["input_ids"].masked_fill(text["input_ids"] == 3, 7)  # 3 is the token of an image

    def unreached(*batches: Any) -> list[str]:
        model = llava.build()
        return [site.stack for site in unreached_sites(model, all_sites(model), batches, task_of(model))]

    def work(number: int) -> Any:
        distributed.start()
        share = ["pixel_values" in batch for _, _, batch in own_batches([text, image])]
        return share, unreached(text, image), unreached(text, text)

    vision = unreached(text)
    assert set(vision) == {"vision"}
    actual = together(2, work)
    assert [code for code, _, _ in actual] == [0, 0], actual
    assert sorted(result[0] for _, result, _ in actual) == [[False], [True]]
    for _, (_, of_both, of_texts), _ in actual:
        assert of_both == []
        assert of_texts == vision


@pytest.mark.parametrize("limit", [tokens.TOKEN_BYTES, 0], ids=["at-once", "in-groups"])
def test_tokens_take_the_passes_of_one_process(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One over its share of the data for every group of sites. Processes without a batch join in, and all know what the
    process that scored a site knows of it."""
    monkeypatch.setattr(tokens, "TOKEN_BYTES", limit)
    data = batches()

    def scored() -> Any:
        model, passes = ZOO["bert"].build().eval(), []
        model.register_forward_pre_hook(lambda *given: passes.append(1))
        sites = headprune.resolve(model)
        named = {"default": make("residual-gradient")}
        made = ScoringPass(model, sites, named, task_of(model), "given", keep=True)
        scores = made.run(data)["default"]
        moments = made.moments(range(len(sites))) or {}
        ahead = [made.without(site, [site.kept[1]], repaired=True) for site in sites]
        return scores, [moments[index].products for index in sorted(moments)], ahead, len(passes)

    def work(number: int) -> Any:
        distributed.start()
        return *scored(), len(list(own_batches(data)))

    scores, products, ahead, passes = scored()
    groups = 1 if limit else len(scores)
    assert passes == groups * len(data)
    assert len(products) == (len(scores) if limit else 0)
    assert all((told is None) == (limit == 0) for told in ahead)
    for count in (2, 6):
        for _, (own, actual, told, ran, share), _ in together(count, work):
            assert torch.equal(own, scores)
            assert len(actual) == len(products)
            assert all(map(torch.equal, actual, products))
            assert told == ahead if limit == 0 else all(map(torch.equal, told, ahead))
            assert ran == groups * share


# --- runs ------------------------------------------------------------------------------------------------------------


def test_trajectories_are_those_of_one_process(tmp_path: Path) -> None:
    ways = {"greedy": GREEDY, "budget": BUDGET, "auto": {**GREEDY, "batch_size": 1, "rescore": "auto"}}
    for count in (1, *COUNTS):
        pruned(count, *((tmp_path / f"{name}-{count}", how) for name, how in ways.items()))
    for name in ways:
        for count in COUNTS:
            same_trajectory(tmp_path / f"{name}-1", tmp_path / f"{name}-{count}")
            records = [json.loads((tmp_path / f"{name}-{n}" / "run.json").read_text()) for n in (1, count)]
            assert records[0]["settings"] == records[1]["settings"]


def test_a_process_that_dies_ends_the_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    files = material()
    command = ["prune", files.bert, "--data", files.data_csv, "--out", str(broken)]
    options = ["--calibration-samples", "10", "--batch-size", "3", "--keep", "5"]
    step = Pruner._take_step

    def dying(dies: int) -> Any:
        def run(number: int) -> None:
            def take(self: Pruner) -> Any:
                if number == dies and len(self.steps) == 2 + len(self.known):
                    os.kill(os.getpid(), signal.SIGKILL)
                return step(self)

            Pruner._take_step = take  # type: ignore[method-assign]
            sys.argv = ["headprune", *command, *options]
            headprune.cli.main.main()

        return run

    def ended(actual: Any, codes: list[int]) -> None:
        assert [code for code, _, _ in actual] == codes, actual
        said = "".join(said for _, _, said in actual)
        assert said.count("Error: ") == said.count("has died") == said.count("same command resumes") == 1
        assert "Traceback" not in said

    ended(together(2, dying(1)), [1, -signal.SIGKILL])
    assert len(steps_of(broken)) == 2
    ended(together(4, dying(0)), [-signal.SIGKILL, 1, 1, 1])  # on with more of them, and this time without the first
    assert len(steps_of(broken)) == 4
    pruned(1, (whole, GREEDY), (broken, GREEDY))  # and on with one
    same_trajectory(whole, broken)
    interrupt(broken, 4)
    pruned(2, (broken, GREEDY))
    same_trajectory(whole, broken)


def test_a_wrong_input_is_one_sentence(tmp_path: Path) -> None:
    files = material()
    for data, criterion, words in (
        (files.data_csv, "nonesuch", "nonesuch"),  # before anything is loaded
        (files.unlabelled_csv, "his", "labels"),  # after it
    ):
        out = tmp_path / "run"
        actual = commanded(2, "prune", files.bert, "--data", data, "--out", out, "--criterion", criterion)
        assert [code for code, _, _ in actual] == [2, 2], actual
        said = actual[0][2] + actual[1][2]
        assert said.count("Error: ") == 1
        assert words in said
        assert not out.exists()
    assert [code for code, _, _ in commanded(2, "prune", files.bert, "--nonesuch")] == [2, 2]
    # A verb that has nothing to share is done by the first process.
    actual = commanded(2, "inspect", files.bert)
    assert [code for code, _, _ in actual] == [0, 0]
    assert "heads" in actual[0][2]
    assert actual[1][2] == ""


def test_torchrun_starts_them() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "headprune"]
    files = material()
    arguments = ["score", files.bert, "--data", files.data_csv, "--json", "--batch-size", "6"]
    path = os.pathsep.join(filter(None, [str(Path(headprune.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*launch, *arguments],
        env={**environment(), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    alone = json.loads(commanded(1, *arguments)[0][2])
    for own, row in zip(said["scores"], alone["scores"], strict=True):
        assert own == pytest.approx(row, rel=1e-6)
    assert said["accuracy"] == alone["accuracy"]
    assert said["samples"] == alone["samples"] == 36
