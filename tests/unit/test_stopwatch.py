"""Budgets of time, with a clock that says what the test wants."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from headprune.measure.latency import Curve, LatencyTable
from headprune.search import stopwatch
from headprune.search.budget import units
from headprune.search.stopwatch import Stopwatch
from headprune.surgery.remove_units import remove_units
from headprune.units import Member, all_sites
from zoo import ZOO


def table_of(model: Any, **asked: Any) -> LatencyTable:
    """One second a head, a tenth a neuron, and five that stay."""
    sites = all_sites(model)
    curves = tuple(
        Curve(
            site.kind,
            site.place,
            (site.index,),
            tuple(range(units(site) + 1)),
            tuple(count * (1.0 if site.kind == "heads" else 0.1) for count in range(units(site) + 1)),
        )
        for site in sites
    )
    return LatencyTable(32, 9, 1, "cpu", "float32", "none", 1, 5.0, curves)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    monkeypatch.setattr(stopwatch, "latency_table", table_of)
    return Stopwatch(ZOO["bert"].build(), 2, 9, None)


def test_prices_are_those_of_the_table(watch: Stopwatch) -> None:
    sites = all_sites(ZOO["bert"].build())
    known = watch.prices(sites)
    heads = sum(units(site) for site in sites if site.kind == "heads")
    neurons = sum(units(site) for site in sites if site.kind == "neurons")
    assert known.dense == pytest.approx(5 + heads + 0.1 * neurons)
    assert known.total({}, sites) == pytest.approx(known.dense)
    assert known.of(sites[0], 2) == 2.0


def test_the_clock_says_how_far_the_table_is_off(watch: Stopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several turns the shortest counts, relative to the dense model in the same turns."""
    model = copy.deepcopy(watch.dense)
    first = all_sites(model)[0]
    remove_units(model, [Member(0, head) for head in first.kept])
    seen: dict[str, Any] = {}

    def turns(runs: Any, repeats: int, clock: Any, phase: str) -> dict[str, list[float]]:
        seen.update(runs)
        return {"dense": [4.0, 2.0, 3.0], "pruned": [9.0, 1.0, 5.0]}

    monkeypatch.setattr(stopwatch, "time_in_turns", turns)
    assert watch.share(model, all_sites(model)) == 0.5
    assert seen["dense"].module is watch.dense
    assert seen["pruned"].module is model
    assert {name: tuple(value.shape) for name, value in seen["dense"].kwargs.items()}["input_ids"] == (2, 9)
    dense = watch.table.dense
    assert watch.factor == pytest.approx(0.5 / ((dense - len(first.kept)) / dense))


def test_the_dense_model_is_one_of_its_own(watch: Stopwatch) -> None:
    model = ZOO["bert"].build()
    own = Stopwatch(model, 1, 9, None)
    remove_units(model, [Member(0, 0)])
    assert all_sites(own.dense)[0].size == all_sites(model)[0].size + 1
