"""Budgets: points, ladders, prices, and how sites share what there is."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from headprune.errors import ScheduleError
from headprune.measure.costs import flops, total_parameters
from headprune.search.allocate import Curve, allocate, groups
from headprune.search.budget import Budget, check_reachable, intermediate_shares, points, prices
from headprune.search.config import PruneConfig
from headprune.search.selection import choose, least_left, ranked
from headprune.surgery.remove_units import remove_units
from headprune.units import all_sites, kept_mask
from zoo import ZOO

BOTH = ("heads", "neurons")


def test_points_come_in_the_order_in_which_a_run_meets_them() -> None:
    assert points("0.5,0.8", "keep_flops") == (0.8, 0.5)
    assert points((3, 1.5, 2), "speedup") == (1.5, 2.0, 3.0)
    assert points(0.5, "keep_parameters") == (0.5,)


@pytest.mark.parametrize(
    ("value", "name", "said"),
    [
        ("half", "keep_flops", "keep_flops takes a number such as 0.5"),
        (1.5, "keep_flops", "keep_flops must be between 0 and 1"),
        (0, "keep_memory", "keep_memory must be between 0 and 1"),
        (0.5, "speedup", "speedup must be above 1, such as 2.0"),
        ("", "speedup", "speedup takes a number such as 2.0"),
    ],
)
def test_points_that_make_no_sense(value: object, name: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        points(value, name)


def test_a_ladder_goes_down_in_equal_ratios_through_every_point() -> None:
    assert intermediate_shares((0.5,), 2) == pytest.approx([0.5**0.5, 0.5])
    rungs = intermediate_shares((0.8, 0.5), 3)
    assert rungs == pytest.approx([0.8, (0.8 * 0.5) ** 0.5, 0.5])  # one third of the way, then two
    assert {0.8, 0.5} <= {*rungs}
    assert intermediate_shares((0.3,), 1) == [0.3]
    assert intermediate_shares((0.6, 0.5, 0.4, 0.3, 0.2), 1) == [0.6, 0.5, 0.4, 0.3, 0.2]
    assert len(intermediate_shares((0.6, 0.5, 0.4, 0.3, 0.2), 6)) == 7  # few more than the last alone takes
    assert intermediate_shares((0.0,), 2) == [0.5, 0.0]


@pytest.mark.parametrize("name", ["bert", "llama-gqa", "gpt2", "albert", "phi3"])
@pytest.mark.parametrize("measure", ["parameters", "flops", "memory", "units"])
def test_prices_are_what_a_cut_model_costs(name: str, measure: str) -> None:
    """The price of counts is the cost of the model that has these counts, whatever goes where."""
    model = ZOO[name].build()
    sites = all_sites(model)
    known = prices(model, sites, measure)  # type: ignore[arg-type]
    gone = [m for site in sites for unit in site.units()[: site.index % 3] for m in unit]
    remove_units(model, gone)
    after = all_sites(model)
    expected = {
        "parameters": lambda: total_parameters(model),
        "memory": lambda: 4 * total_parameters(model),
        "flops": lambda: flops(model, after).total,
        "units": lambda: sum(site.size for site in after),
    }[measure]()
    assert known.total({}, after) == pytest.approx(expected, rel=1e-12)


def best_by_trying(curves: dict[int, Curve], budget: float) -> float:
    """The least error of all combinations that the budget allows."""
    places = [range(len(curve.counts)) for curve in curves.values()]
    errors = [
        sum(curve.errors[place] for curve, place in zip(curves.values(), chosen, strict=True))
        for chosen in itertools.product(*places)
        if sum(curve.prices[place] for curve, place in zip(curves.values(), chosen, strict=True)) <= budget + 1e-12
    ]
    return min(errors, default=float("inf"))


@pytest.mark.parametrize("seed", range(20))
def test_allocation_is_near_the_best_of_all_combinations(seed: int) -> None:
    """On convex curves the exchange rate finds the optimum up to what one step of one site is worth."""
    draw = random.Random(seed)
    curves = {}
    for site in range(4):
        rises = sorted(draw.random() for _ in range(4))
        errors = [sum(rises[:k]) for k in range(5)][::-1]
        price = draw.choice([1.0, 3.0])
        curves[site] = Curve((0, 1, 2, 3, 4), tuple(errors), tuple(price * k for k in range(5)))
    whole = sum(curve.prices[-1] for curve in curves.values())
    for share in (0.2, 0.5, 0.8):
        keep = allocate(curves, share * whole)
        assert keep is not None
        price = sum(curve.prices[keep[site]] for site, curve in curves.items())
        error = sum(curve.errors[keep[site]] for site, curve in curves.items())
        assert price <= share * whole
        assert error <= best_by_trying(curves, share * whole) + max(c.errors[0] - c.errors[1] for c in curves.values())


def test_allocation_spends_what_is_left_and_refuses_what_cannot_be() -> None:
    curves = {0: Curve((0, 1), (1.0, 0.0), (0.0, 5.0)), 1: Curve((0, 1), (0.1, 0.0), (0.0, 1.0))}
    assert allocate(curves, 6.0) == {0: 1, 1: 1}
    assert allocate(curves, 5.0) == {0: 1, 1: 0}
    assert allocate(curves, 4.0) == {0: 0, 1: 1}  # the better one does not fit
    assert allocate({0: Curve((2, 3), (1.0, 0.0), (2.0, 3.0))}, 1.0) is None


def test_widths_are_multiples_and_never_fewer_than_must_stay() -> None:
    assert groups(20, 8, 0) == (0, 8, 16, 20)
    assert groups(20, 8, 1) == (8, 16, 20)
    assert groups(6, 1, 2) == (2, 3, 4, 5, 6)


@pytest.mark.parametrize("widths", ["global", "uniform"])
def test_what_is_chosen_meets_the_budget_in_widths_that_hardware_likes(widths: str) -> None:
    model = ZOO["bert"].build()
    sites = all_sites(model)
    known = prices(model, sites, "flops")
    scores = torch.rand(kept_mask(sites).shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    floor = known.rest / known.dense
    target = (floor + 0.5 * (1 - floor)) * known.dense
    gone = choose(scores, sites, known, target, kinds=BOTH, round_to=4, widths=widths)
    remove_units(model, gone)
    after = all_sites(model)
    left = known.total({}, after)
    assert left <= target
    assert left >= target - max(known.of(site, 1) for site in sites if site.kind == "heads") * 3
    assert all(site.size % 4 == 0 for site in after if site.kind == "neurons")
    for site in after:  # and the least important went, at every site
        rows = {True: [], False: []}
        for member in range(site.original):
            rows[member in site.kept].append(float(scores[site.index, member]))
        if rows[True] and rows[False]:
            assert max(rows[False]) <= min(rows[True])


def test_heads_alone_leave_neurons_alone() -> None:
    model = ZOO["bert"].build()
    sites = all_sites(model)
    known = prices(model, sites, "units")
    scores = torch.rand(kept_mask(sites).shape, dtype=torch.float64)
    gone = choose(scores, sites, known, known.dense - 4, kinds=("heads",))
    assert {sites[member.site].kind for member in gone} == {"heads"}
    assert len(gone) == 4


def test_what_must_stay_stays() -> None:
    site = all_sites(ZOO["bert"].build())[0]
    assert least_left(site, 0) == 0
    assert least_left(site, 2) == 2
    assert least_left(site, 99) == site.size
    order = ranked(torch.zeros(99, 99, dtype=torch.float64), site)
    assert [unit[0].index for _, unit in order] == list(site.kept)  # equal ones by their ids


def test_a_budget_that_cannot_be_met_is_refused_with_what_could_be() -> None:
    model = ZOO["bert"].build()
    sites = all_sites(model)
    known = prices(model, sites, "parameters")
    with pytest.raises(ScheduleError, match="nothing but the vocabulary left it would still be 0"):
        check_reachable(Budget("parameters", (0.01,)), known, sites, lambda site: 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep_flops": 0.5, "speedup": 2}, "One budget at a time: keep_flops and speedup"),
        ({"keep_flops": 0.5, "keep": 0.5}, "One budget at a time: keep_flops and keep"),
        ({"keep": 0.5, "units": "heads,neurons"}, "keep counts units of one kind"),
        ({"method": "flop"}, "There is no method 'flop'"),
        ({"widths": "wide", "keep_flops": 0.5}, "There is no allocation widths='wide'"),
    ],
)
def test_settings_that_contradict_each_other(options: dict, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        PruneConfig(**options)


def test_defaults_follow_from_what_is_asked_for() -> None:
    assert (PruneConfig().units, PruneConfig().schedule) == (("heads",), "greedy")
    asked = PruneConfig(speedup=2)
    assert (asked.units, asked.schedule, asked.budget) == (BOTH, "rounds", Budget("latency", (0.5,)))
    paper = PruneConfig(keep_flops=0.8, criterion="gnorm")  # which knows heads alone
    assert paper.units == ("heads",)
    assert PruneConfig(units="neurons", keep=0.5).schedule == "rounds"
