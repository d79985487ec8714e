"""One run gives the whole family: a model per point of a budget, a page to choose from, and nothing lost by a kill."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import headprune
from browser import Browser, Page, find_browser
from headprune.cli.budget_points import print_points
from headprune.measure.costs import flops, total_parameters
from headprune.reports import tradeoff
from headprune.reports.budget_points import points_of
from headprune.reports.page import charts, write_report
from headprune.reports.run_view import load_runs
from headprune.runs.experiment import Experiment, run_experiment
from headprune.search.budget import prices, units
from headprune.search.observers import Callback
from headprune.search.schedules import rounds
from headprune.units import sites_of
from run_helpers import material
from synthetic_runs import make_run

PROGRAM, MISSING = find_browser()
BOTH: Any = ("heads", "neurons")
ASKED = (0.8, 0.6)
READY = "document.body?.dataset.ready === 'yes'"


def go(out: Path, **options: Any) -> dict[str, Any]:
    settings = {"keep_flops": ASKED, "rounds": 3, "round_to": 1, "calibration_samples": 8, "batch_size": 6, **options}
    on_step = settings.pop("on_step", None)
    observer = None if on_step is None else Callback(on_step)
    m = material()
    return run_experiment(Experiment(model=m.bert, data=m.data_csv, **settings), out, observer=observer)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing happened to."""
    folder = tmp_path_factory.mktemp("family") / "run"
    go(folder)
    return folder


def record_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


# --- the models ---


def test_every_point_has_a_model_that_meets_it(whole: Path) -> None:
    dense = headprune.load(material().bert)
    points = record_of(whole)["points"]
    assert [point["label"] for point in points] == ["flops-0.8", "flops-0.6"]
    for asked, point in zip(ASKED, points, strict=True):
        model = headprune.load(whole / point["model"])
        sites = sites_of(model, BOTH)
        share = flops(model, sites).total / flops(dense, sites_of(dense, BOTH)).total
        assert asked - 0.1 < share <= asked
        assert point["shares"]["flops"] == pytest.approx(share, abs=1e-4)
        assert point["shares"]["parameters"] == pytest.approx(
            total_parameters(model) / total_parameters(dense), abs=1e-4
        )
        assert point["units"] == {kind: sum(s.size for s in sites if s.kind == kind) for kind in BOTH}
        card = (whole / point["model"] / "README.md").read_text()
        assert f"| heads | 12 | {point['units']['heads']} |" in card
        assert f"by the point {point['label']} of its budget" in card.replace("\\", "")
    last = (whole / points[-1]["model"] / "model.safetensors").read_bytes()
    assert last == (whole / "model" / "model.safetensors").read_bytes()


class Stopped(BaseException):
    """As a kill would: nothing catches it."""


def stop_at(number: int) -> Callable[[Any], None]:
    def on_step(step: Any) -> None:
        if step.step == number:
            raise Stopped

    return on_step


@pytest.mark.parametrize("after", [0, 1])
def test_a_run_that_was_killed_at_a_point_goes_on_and_has_all_models(whole: Path, tmp_path: Path, after: int) -> None:
    """At the step of the first point, which is in the journal while its model is not on disk, and a step later."""
    points = record_of(whole)["points"]
    first, out = points[0], tmp_path / "run"
    with pytest.raises(Stopped):
        go(out, on_step=stop_at(first["step"] + after))
    assert (out / first["model"]).is_dir() == bool(after)
    assert not (out / points[1]["model"]).exists()
    record = go(out)
    without_time = [{**point, "shares": point["shares"]["flops"]} for point in record["points"]]
    assert without_time == [{**point, "shares": point["shares"]["flops"]} for point in points]
    for folder in ("model", *(point["model"] for point in points)):
        one, other = (run / folder / "model.safetensors" for run in (whole, out))
        assert one.read_bytes() == other.read_bytes(), folder


class SlowingDown:
    """A stopwatch by which every model is slower than the table says, and each time by more."""

    def __init__(self, model: Any, *_: Any) -> None:
        self.prices_of = prices(model, sites_of(model, BOTH), "flops")
        self.factor, self.called = 1.0, 0

    def prices(self, sites: Any) -> Any:
        return self.prices_of

    def share(self, model: Any, sites: Any) -> float:
        self.called += 1
        self.factor = 1 + 0.05 * self.called
        counts = {site.index: units(site) for site in sites}
        return self.factor * self.prices_of.total(counts, sites) / self.prices_of.dense


def test_the_last_point_is_the_model_that_the_clock_was_content_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "Stopwatch", SlowingDown)
    out = tmp_path / "run"
    record = go(out, keep_flops=None, speedup=(1.2, 1.5), rounds=2)
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    last = record["points"][-1]
    assert last["step"] == record["result"]["step"] == len(lines) - 1
    assert last["step"] > record["points"][0]["step"] + 1, "no round was taken to make up for the clock"
    assert last["shares"]["latency"] == pytest.approx(lines[-1]["latency"], abs=1e-4)
    assert record["savings"]["shares"]["latency"] == last["shares"]["latency"]
    one, other = (out / folder / "model.safetensors" for folder in ("model", last["model"]))
    assert one.read_bytes() == other.read_bytes()
    said = points_of(record)[-1].target_and_result
    assert said == f"target 1.5x, measured {1 / last['shares']['latency']:.2f}x"


# --- the page ---


@pytest.fixture
def page() -> Iterator[Page]:
    if PROGRAM is None:
        pytest.skip(MISSING)
    with Browser(PROGRAM) as browser, browser.page() as page:
        yield page


def text(page: Page, selector: str) -> list[str]:
    return page.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent.trim())")


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_shows_what_there_is_to_choose_from(page: Page, whole: Path, tmp_path: Path, dark: bool) -> None:
    page.emulate(width=1040, dark=dark)
    page.open(write_report([whole], tmp_path / "page.html"), READY)
    for measure in ("latency", "parameters", "flops"):
        assert text(page, f"#chart-family-{measure} svg .mark-text.role-mark text") == ["dense", "80%", "60%"]
    rows = text(page, "table.points tbody tr td:first-child")
    assert rows == ["dense", "80% of the FLOPs", "60% of the FLOPs"]
    cells = text(page, "table.points tbody tr:last-child td")
    point = record_of(whole)["points"][-1]
    assert cells[2] == f"{point['units']['heads']} of 12"
    assert cells[3] == f"{point['units']['neurons']} of 60"
    assert cells[4:7] == [f"{point['shares'][name]:.1%}" for name in ("parameters", "flops", "latency")]
    loads = [code for code in text(page, "pre.copy") if code.startswith("model = headprune.load")]
    assert loads == [f'model = headprune.load("{whole}/models/flops-{share}")' for share in ASKED]
    exec(loads[0], {"headprune": headprune})
    tops = page.evaluate("[...document.querySelectorAll('.family > div')].map(e => e.getBoundingClientRect().top)")
    assert len(tops) == 3
    assert len(set(tops)) == 1, "three figures side by side"
    assert page.errors == []
    page.emulate(width=400, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out on a phone"


def values(chart: Mapping[str, Any], layer: int) -> list[dict[str, Any]]:
    spec = chart["layer"][layer].get("data") or chart["data"]  # that which all layers share is hoisted
    return chart["datasets"][spec["name"]] if "name" in spec else spec["values"]


def test_figures_are_where_the_journal_says(whole: Path) -> None:
    (run,) = load_runs([whole])
    made = {name: chart.to_dict(validate=True) for name, chart in tradeoff.figures([run]).items()}
    assert list(made) == ["family-latency", "family-parameters", "family-flops"]
    points = run.record["points"]
    for name in ("parameters", "flops"):
        rows = values(made[f"family-{name}"], 1)
        assert [row["step"] for row in rows] == [step.step for step in run.steps]
        assert [row["value"] for row in rows] == [step.metric for step in run.steps]
        assert rows[0]["share"] == 1
        for point in points:
            assert rows[point["step"]]["share"] == pytest.approx(point["shares"][name], abs=2e-4)
            assert [rows[point["step"]][end] for end in ("low", "high")] == point["interval"]
    timed = values(made["family-latency"], 0)  # marks alone: no step was timed
    assert [row["label"] for row in timed] == ["dense", "80%", "60%"]
    assert [row["share"] for row in timed] == [1, *(point["shares"]["latency"] for point in points)]


def test_a_budget_of_time_has_a_line_of_times(whole: Path) -> None:
    (run,) = load_runs([whole])
    steps = [dataclasses.replace(step, latency=1 - 0.1 * step.step if step.step else None) for step in run.steps]
    made = tradeoff.figures([dataclasses.replace(run, steps=steps)])["family-latency"].to_dict(validate=True)
    assert [row["share"] for row in values(made, 1)] == pytest.approx([1 - 0.1 * step.step for step in steps])


def test_a_single_point_is_the_result(tmp_path: Path) -> None:
    record = go(tmp_path / "run", keep_flops=None, keep_parameters=0.8, rounds=2)
    assert record["points"] == []
    (point,) = points_of(record)
    share = record["savings"]["shares"]["parameters"]
    assert (point.folder, point.step, point.short) == ("model", record["result"]["step"], "80%")
    assert point.target_and_result == f"target 80% of the parameters, measured {100 * share:.1f}%"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "80% of the parameters" in page
    assert f"{tmp_path / 'run'}/model" in page.replace("&#34;", '"')
    console = Console(record=True, width=80)
    print_points(record, tmp_path / "run", console)
    assert console.export_text().strip() == f"The budget: {point.target_and_result}."


def test_a_run_without_a_budget_has_no_such_part(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert tradeoff.figures(load_runs([run])) == {}
    page = write_report([run], tmp_path / "page.html").read_text()
    assert 'id="family"' not in page
    assert not any(name.startswith("family") for name in charts(load_runs([run])))


def test_an_unfinished_run_has_no_points_yet(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", stop=None, keep_flops=0.5)
    assert points_of(load_runs([run])[0].record) == []
    assert 'id="family"' not in write_report([run], tmp_path / "page.html").read_text()
