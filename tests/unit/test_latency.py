"""The table of times, by a clock that counts parameters: what it says must then be what whole models take."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune
from headprune.errors import HeadpruneError
from headprune.measure import latency, timing
from headprune.measure.curves import isotonic
from headprune.measure.latency import LatencyTable, interpolate, latency_table
from headprune.measure.savings import measure_speedup, shares
from headprune.measure.sublayers import counts_of, fewest_of, with_units
from headprune.units import all_sites
from helpers import assert_unchanged, state_of
from run_helpers import bert, material
from run_helpers import headprune as program
from score_helpers import labelled
from zoo import ZOO

NANO = 1e-9


def seconds_of(module: torch.nn.Module) -> float:
    return NANO * sum(parameter.numel() for parameter in module.parameters())


@pytest.fixture(autouse=True)
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADPRUNE_CACHE", str(tmp_path))
    return tmp_path / "latency"


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every call runs, and takes a nanosecond for each parameter."""
    runs: list[Any] = []

    def time_once(run: timing.TimedCall, clock: Any) -> float:
        run.module(*run.before(run.args), **run.before(run.kwargs))
        runs.append(run)
        return seconds_of(run.module)

    monkeypatch.setattr(timing, "time_once", time_once)
    return runs


# A table of each kind: encoder, tied layers, decoder, groups of heads, encoder-decoder, images, two towers.
FAMILIES = ["bert", "gpt2", "llama", "qwen2", "t5", "bart", "vit", "modernbert", "clip"]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in ZOO])
def test_the_parts_add_up_to_whole_models(name: str, taken: list[Any]) -> None:
    model = ZOO[name].build()
    sites, before = all_sites(model), state_of(model)
    table = latency_table(model, batch_size=2, length=8, repeats=1)
    assert_unchanged(model, before)
    assert table.unmeasured == ()
    assert sorted(site for curve in table.curves for site in curve.sites) == [site.index for site in sites]
    assert table.dense == pytest.approx(seconds_of(model))
    rng = random.Random(0)
    for _ in range(3):
        left = {site.index: rng.randint(fewest_of(site), len(site.units())) for site in sites}
        assert table.estimate(left) == pytest.approx(seconds_of(with_units(model, sites, left)), rel=1e-3)
    site = sites[-1]
    per_unit = headprune.measure.costs.unit_parameters(model, sites)[-1]
    assert table.unit_cost(site.index, len(site.units())) == pytest.approx(NANO * per_unit, rel=0.05)
    assert table.unit_cost(site.index, 0) == 0


def test_sites_that_are_alike_are_timed_once(taken: list[Any]) -> None:
    model = ZOO["bert"].build()
    table = latency_table(model, length=8, repeats=1)
    assert [(curve.kind, len(curve.sites)) for curve in table.curves] == [("heads", 3), ("neurons", 3)]
    assert [curve.counts[0] for curve in table.curves] == [0, 0]
    wholes = sum(run.module.__class__ is model.__class__ for run in taken)
    assert wholes < len(taken) / 2


def test_it_is_kept_and_read_again(taken: list[Any], cached: Path) -> None:
    model = ZOO["bert"].build()
    first = latency_table(model, length=8, repeats=1)
    measured = len(taken)
    assert latency_table(model, length=8, repeats=1) == first
    assert len(taken) == measured
    assert latency_table(model, length=8, repeats=1, fresh=True) == first
    latency_table(model, length=9, repeats=1)
    latency_table(model, length=8, batch_size=2, repeats=1)
    latency_table(model, length=8, threads=torch.get_num_threads() + 1, repeats=1)
    assert len(list(cached.iterdir())) == 4
    for file in cached.iterdir():
        file.write_text("{}")
    assert latency_table(model, length=8, repeats=1) == first  # a broken file is as good as none


def test_a_model_without_weights_has_a_table(taken: list[Any]) -> None:
    model = ZOO["bert"].build()
    with torch.device("meta"):
        shapes = type(model)(model.config)
    assert latency_table(shapes, length=8, repeats=1).dense == pytest.approx(seconds_of(model))
    assert next(shapes.parameters()).is_meta


def test_a_pruned_model_has_a_table_of_what_is_left(taken: list[Any]) -> None:
    model = ZOO["bert"].build()
    pruned = with_units(model, all_sites(model), {0: 0, 1: 2, 3: 7})
    table = latency_table(pruned, length=8, repeats=1)
    assert table.unmeasured == (0,)
    assert table.dense == pytest.approx(seconds_of(pruned))
    assert table.estimate({1: 1}) < table.dense
    with pytest.raises(HeadpruneError, match="0 to 2 units, not 3"):
        table.estimate({1: 3})
    with pytest.raises(HeadpruneError, match="Site 99 is not in this table"):
        table.estimate({99: 1})


def test_a_batch_of_ones_own(taken: list[Any]) -> None:
    model = ZOO["bert"].build()
    assert latency_table(model, batch=ZOO["bert"].batch(0), repeats=1).batch_size == 3


def test_threads_are_put_back() -> None:
    before = torch.get_num_threads()
    with timing.using_threads(before + 1) as used:
        assert used == torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    assert timing.choose_clock(1, torch.device("cpu")) is not timing.choose_clock(2, torch.device("cpu"))


def test_numbers_below_one_are_refused() -> None:
    with pytest.raises(HeadpruneError, match="at least 1"):
        latency_table(ZOO["bert"].build(), batch_size=0)


def test_short_runs_have_more_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "time_once", lambda run, clock: 0.5)
    run = timing.TimedCall(torch.nn.Identity())
    assert len(timing.time_in_turns({"a": run, "b": run}, 2)["a"]) == 2
    assert len(timing.time_in_turns({"a": run, "b": run}, 2, seconds_at_least=5.0)["a"]) == 5
    assert len(timing.time_in_turns({"a": run, "b": run}, 2, seconds_at_least=1e9)["a"]) == 2 * timing.MORE


def test_a_clock_is_read_before_and_after() -> None:
    ticks = iter([1.0, 4.0])
    assert timing.time_once(timing.TimedCall(torch.nn.Identity(), (torch.zeros(1),)), lambda: next(ticks)) == 3.0


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1, 2, 3], [1, 2, 3]), ([1, 3, 2], [1, 2.5, 2.5]), ([3, 2, 1], [2, 2, 2]), ([], [])],
)
def test_rising(values: list[float], expected: list[float]) -> None:
    assert isotonic(values) == expected


def test_straight_lines() -> None:
    assert [interpolate([0, 2, 4], [0.0, 1.0, 5.0], place) for place in (0, 1, 2, 3, 4)] == [0.0, 0.5, 1.0, 3.0, 5.0]


def test_curves_bend_as_whole_models_do() -> None:
    """Alone the time falls by the units; in the model half of them take three quarters."""
    curve = latency.Curve("heads", "encoder self", (0, 1), (0, 2, 4), (0.0, 1.0, 2.0))
    wholes = {"dense": 5.0, "heads": 1.0, 0.25: 3.0, 0.5: 4.0, 0.75: 4.5}
    (bent,) = latency.fit_curves([curve], ["heads"], wholes)
    assert bent.seconds == (0.0, 1.5, 2.0)


def test_counts() -> None:
    heads, *_, neurons = all_sites(bert(intermediate_size=1536))
    assert counts_of(heads) == tuple(range(len(heads.units()) + 1))
    assert counts_of(neurons) == (0, 24, *range(125, 1406, 128), 1525, 1536)


def test_as_json() -> None:
    curve = latency.Curve("heads", "encoder self", (0, 1), (0, 2), (0.0, 1.0))
    table = LatencyTable(1, 8, 1, "cpu", "float32", "a processor", 3, 0.5, (curve,), (2,))
    assert LatencyTable.from_json(table.to_json()) == table
    assert table.to_json()["dense"] == 2.5


def test_speedup_and_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios of turns, so that a machine that slows down on the way does not matter."""
    dense = ZOO["bert"].build()
    sites = all_sites(dense)
    pruned = with_units(dense, sites, {site.index: len(site.units()) // 2 for site in sites})
    batch, slower = labelled(ZOO["bert"], 0), iter(range(1, 1000))
    monkeypatch.setattr(
        timing, "time_once", lambda run, clock: ((next(slower) + 1) // 2) * (4.0 if run.module is dense else 1.0)
    )
    assert measure_speedup(dense, pruned, batch) == 4.0
    actual = shares(dense, pruned, batch)
    assert actual["latency"] == 0.25
    assert actual["parameters"] == pytest.approx(seconds_of(pruned) / seconds_of(dense), abs=1e-4)
    assert 0.4 < actual["flops"] < 0.7


def test_the_command(taken: list[Any]) -> None:
    asked = ("inspect", material().bert, "--latency", "--tokens", 8, "--batch-size", 2, "--threads", 1)
    actual = program(*asked, "--json").json["latency"]
    assert (actual["batch_size"], actual["length"], actual["threads"]) == (2, 8, 1)
    assert actual["curves"][0]["counts"] == [0, 1, 2, 3, 4]
    measured = len(taken)
    done = program(*asked)
    assert len(taken) == measured
    assert done.code == 0
    for said in ("Time of a pass of 2 x 8", "encoder self x 3", "encoder feed-forward x 3", "everything else"):
        assert said in done.out
    assert program(*asked, "--fresh").code == 0
    assert len(taken) > measured
    assert "latency" not in program("inspect", material().bert, "--json").json


@pytest.mark.parametrize(
    ("name", "value"),
    [("rest", "soon"), ("curves", {}), ("counts", [2, 0, 4]), ("counts", [0, 2]), ("seconds", ["a", 1.0, 2.0])],
)
def test_a_damaged_table_of_the_cache_is_ignored(name: str, value: Any, tmp_path: Path) -> None:
    curve = {"kind": "heads", "place": "encoder", "sites": [0], "counts": [0, 2, 4], "seconds": [0.0, 0.5, 1.0]}
    table = {"batch_size": 1, "length": 8, "threads": 1, "device": "cpu", "dtype": "float32", "processor": "x"}
    table |= {"repeats": 3, "rest": 0.25, "curves": [curve], "unmeasured": []}
    file = tmp_path / "table.json"
    file.write_text(json.dumps(table))
    assert latency._read(file).estimate({0: 2}) == 0.75
    (curve if name in curve else table)[name] = value
    file.write_text(json.dumps(table))
    assert latency._read(file) is None
