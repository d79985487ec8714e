"""Published methods by name: a registry, and every one of them meets a budget on an encoder and on a language model."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import headprune
import run_helpers
from headprune.cli.main import app
from headprune.errors import DataError, RegistrationError, ScheduleError
from headprune.measure.costs import flops
from headprune.repair.apply import plan_repairs
from headprune.repair.front_to_back import calls_of_sites, remove_front_to_back
from headprune.repair.regression import Sums, fit
from headprune.repair.remove import remove_from_sites
from headprune.search.budget import Prices
from headprune.search.methods import METHODS, Method, method_named, register_method
from headprune.search.selection import choose
from headprune.tasks import task_of
from headprune.units import Member, all_sites
from score_helpers import labelled, some_batches
from zoo import ZOO

NAMES = ["headprune", "kwon", "flap", "wanda-sp", "ziplm", "osscar", "llm-pruner", "magnitude", "random"]


@pytest.fixture
def clean_methods() -> Iterator[None]:
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


# --- the registry ---------------------------------------------------------------------------------------------------


def test_every_method_names_its_parts_and_its_paper() -> None:
    assert list(METHODS) == NAMES
    for one in METHODS.values():
        assert one.reference
        assert one.use
        config = headprune.PruneConfig(method=one.name, keep_flops=0.5)
        settings = config.settings()
        assert {name: settings[name] for name in one.settings()} == {
            **one.settings(),
            "criterion": str(config.criterion),
        }


def test_a_wrong_name_is_answered_with_the_nearest_and_a_taken_one_refused() -> None:
    with pytest.raises(ScheduleError, match="did you mean 'flap'"):
        method_named("flab")
    with pytest.raises(RegistrationError, match="exists already"):
        register_method(METHODS["flap"])


@pytest.mark.usefixtures("clean_methods")
def test_a_users_method_works_by_its_name() -> None:
    headprune.register_method(Method("mine", "this test", "for this test", "his", widths="uniform"))
    config = headprune.PruneConfig(method="mine", keep_flops=0.5)
    assert (str(config.criterion), config.widths, config.repair, config.rounds) == ("his", "uniform", "none", 1)


def test_what_was_asked_for_goes_before_the_method() -> None:
    config = headprune.PruneConfig(method="flap", keep_flops=0.5, criterion="wanda", rounds=3)
    assert (str(config.criterion), config.rounds, config.repair) == ("wanda", 3, "mean")


@pytest.mark.parametrize("name", NAMES)
def test_what_was_asked_for_goes_before_the_method_where_it_is_the_default_too(name: str) -> None:
    usual = headprune.PruneConfig(keep_flops=0.5)
    given = {"repair": usual.repair, "rounds": usual.rounds, "widths": usual.widths, "units": "heads"}
    settings = headprune.PruneConfig(method=name, keep_flops=0.5, **given).settings()
    assert {option: settings[option] for option in given} == given


def test_other_options_of_a_config_decide_anew_what_was_not_given() -> None:
    config = headprune.PruneConfig(keep_flops=0.5)
    assert (str(config.criterion), config.units, config.schedule) == ("elimination", ("heads", "neurons"), "rounds")
    other = config.with_options(keep_flops=None)
    assert (str(other.criterion), other.units, other.schedule) == ("residual-gradient", ("heads",), "greedy")
    assert config.with_options(criterion="entropy").units == ("heads",)
    given = headprune.PruneConfig(keep_flops=0.5, units="neurons", schedule="rounds")
    assert given.with_options(keep_flops=None, keep=0.5).units == ("neurons",)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"widths": "narrow", "keep_flops": 0.5}, "choose one of global, uniform, threshold"),
        ({"repair": "scale"}, "goes with a budget"),
        ({"repair": "dense", "keep": 0.5}, "goes with a budget"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        headprune.PruneConfig(**options)


def test_removing_by_hand_knows_the_simple_compensations_only() -> None:
    with pytest.raises(DataError, match="goes with a budget"):
        headprune.remove(ZOO["bert"].build(), [(0, 0)], repair="scale", batches=some_batches(ZOO["bert"]))


def test_the_command_line_lists_them() -> None:
    told = CliRunner().invoke(app, ["methods", "--json"])
    assert told.exit_code == 0
    rows = json.loads(told.stdout)["methods"]
    assert [row["name"] for row in rows] == NAMES
    assert rows[2]["criterion"] == "fluctuation(standardize=True)"
    drawn = CliRunner().invoke(app, ["methods"])
    assert all(name in drawn.stdout for name in NAMES)


# --- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "llama-gqa"])
@pytest.mark.parametrize("name", NAMES)
def test_every_method_meets_a_budget(name: str, family: str) -> None:
    model = ZOO[family].build()
    dense = flops(model, all_sites(model)).total
    share = 0.6
    result = headprune.prune(
        model,
        some_batches(ZOO[family]),
        method=name,
        keep_flops=share,
        round_to=1,
        evaluation=[labelled(ZOO[family], 3)],
    )
    left = flops(model, all_sites(model)).total / dense
    assert share - 0.2 < left <= share
    kinds = {repair["kind"] for step in result.trajectory for repair in step.repairs}
    wanted = METHODS[name].repair
    if wanted == "mean" and family == "llama-gqa":
        assert kinds <= {"none"}  # it has no biases
    elif wanted != "none":
        assert wanted in kinds
    else:
        assert not kinds


@pytest.mark.parametrize("name", ["kwon", "flap", "osscar"])
def test_a_run_goes_on_where_it_was_interrupted(name: str, tmp_path: Path) -> None:
    """Repairs are repeated, and must come out as the journal says."""

    def prune(out: Path) -> list[dict[str, Any]]:
        budget = ("--method", name, "--keep-flops", "0.8,0.6", "--round-to", "1")
        done = run_helpers.headprune(
            *run_helpers.prune_command(run_helpers.material().bert, run_helpers.material().data_tsv, out, *budget)
        )
        assert done.code == 0, done.err
        return [{key: step[key] for key in ("removed", "metric", "compensation")} for step in run_helpers.steps_of(out)]

    whole = prune(tmp_path / "whole")
    assert len(whole) == 3
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    run_helpers.interrupt(tmp_path / "again", 2)
    again = prune(tmp_path / "again")
    assert again == whole
    assert json.loads((tmp_path / "again" / "run.json").read_text())["settings"]["method"] == name


def test_a_mean_without_a_bias_is_refused_where_no_method_asked_for_it() -> None:
    with pytest.raises(DataError, match="this model has none"):
        headprune.prune(ZOO["llama-gqa"].build(), some_batches(ZOO["llama-gqa"]), repair="mean", keep_flops=0.6)


# --- one threshold for all sites ------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_a_threshold_takes_the_lowest_scores_of_all_sites(share: float) -> None:
    """Whatever units cost, and with scores below 0: the order over all sites is cut at one place."""
    sites = all_sites(ZOO["bert"].build())
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(len(sites), max(site.original for site in sites), generator=generator)
    each = {site.index: 30.0 if site.kind == "heads" else 1.0 for site in sites}
    total = sum(each[site.index] * site.size for site in sites)
    known = Prices(total, 0.0, lambda site, count: each[site.index] * count)
    kinds = ("heads", "neurons")
    gone = choose(scores, sites, known, share * total, kinds=kinds, round_to=1, widths="threshold")
    everything = sorted((float(scores[site.index, one]), (site.index, one)) for site in sites for one in site.kept)
    prices = list(itertools.accumulate(each[member[0]] for _, member in everything))
    count = next(number + 1 for number, price in enumerate(prices) if total - price <= share * total)
    assert sorted(gone) == sorted(member for _, member in everything[:count])


# --- repairs of other papers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("biased", [True, False])
def test_scales_are_those_of_least_squares(biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    weight, z, y = drawn(5, 6), drawn(40, 6), drawn(40, 5)
    bias = drawn(5) if biased else None
    units = torch.tensor([0, 1, 2, 0, 1, 2])  # columns of a unit need not lie side by side
    y = y + z @ weight.t()
    sums = Sums.blank(6, 5)
    sums.add(z, y, weight, bias, torch.arange(40) % 2)
    repair = fit(weight, bias, sums, "scale", units=units)
    new, before, after = repair.weight, repair.error_without, repair.error
    assert repair.kind == "scale"
    assert new is not None
    parts = torch.stack([(z * (units == unit)) @ weight.t() for unit in range(3)], -1).reshape(-1, 3)
    wanted = (y - (0 if bias is None else bias)).reshape(-1)
    expected = torch.linalg.lstsq(parts, wanted[:, None]).solution[:, 0]
    assert torch.allclose(new, weight * expected[units], rtol=1e-2)  # a small ridge holds scales near 1
    assert after <= before
    assert after == pytest.approx(float((wanted - parts @ expected).square().sum() / 40), rel=1e-4)


def test_scales_out_of_bounds_leave_the_weights() -> None:
    sums = Sums.blank(1, 1)
    z = torch.ones(4, 1, dtype=torch.float64)
    weight = torch.ones(1, 1)
    sums.add(z, 100 * z, weight, None, torch.arange(4) % 2)
    repair = fit(weight, None, sums, "scale", units=torch.tensor([0]))
    assert (repair.kind, repair.weight) == ("none", None)


@pytest.mark.parametrize("word", ["lstsq", "mean"])
def test_sites_are_solved_one_after_the_other_on_what_the_last_one_gives(word: Any) -> None:
    """A word of repair is one computation: what a budget does at a site is what a greedy step does there."""
    model = ZOO["bert"].build()
    sites, batches = all_sites(model), some_batches(ZOO["bert"])
    task = task_of(model)
    chosen = [Member(sites[0].index, 0), *(Member(site.index, 3) for site in sites if site.kind == "neurons")]
    order = list(calls_of_sites(model, sites, batches[0], task))
    assert order[:2] == [0, next(site.index for site in sites if site.kind == "neurons")]
    by_hand = copy.deepcopy(model)
    repairs = remove_front_to_back(model, sites, chosen, batches, task, word)
    for index in [index for index in order if any(member.site == index for member in chosen)]:
        own = [member for member in chosen if member.site == index]
        (planned,) = plan_repairs(by_hand, sites, own, word, batches, task)
        (actual,) = (repair for repair in repairs if repair.site == index)
        assert actual.kind == planned.kind == word
        assert actual.error == pytest.approx(planned.error)
        remove_from_sites(by_hand, sites, own, repair=word, batches=batches, task=task)
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
