"""The page of several runs: which of them are one entry, which were paired, what it says, and the command it names."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pytest

from headprune.measure.intervals import wilson
from headprune.reports.page import charts, write_report
from headprune.reports.run_view import RunView, entries, load_runs
from headprune.reports.save_figures import save_figure
from headprune.runs.experiment import Experiment
from synthetic_runs import make_run


def compared_runs(folder: Path, *, trials: int = 2, samples: int = 64) -> Path:
    """A directory as `compare` leaves it: gnorm, his with a compensation of its own, and random."""
    options: dict[str, Any] = {"savings": False, "samples": samples, "explore": True, "seed": 5}
    make_run(folder / "gnorm", criterion="gnorm", repair="none", **options)
    make_run(folder / "his+mean", criterion="his", repair="mean", **options)
    for trial in range(trials):
        make_run(folder / f"random-seed{trial}", criterion=f"random(seed={trial})", repair="none", **options)
    rows = [
        {"name": "gnorm", "runs": ["gnorm"]},
        {"name": "his+mean", "runs": ["his+mean"]},
        {"name": "random", "runs": [f"random-seed{trial}" for trial in range(trials)]},
    ]
    about = {"criteria": [row["name"] for row in rows], "trials": trials, "repair": "none"}
    (folder / "comparison.json").write_text(json.dumps({"format": 2, "compared": about, "criteria": rows}))
    return folder


def commands(folder: Path) -> list[str]:
    page = write_report([folder], folder / "report.html").read_text()
    return [html.unescape(part.split("</pre>")[0]) for part in page.split("<script>")[0].split("<pre>")[1:]]


def test_the_page_of_a_comparison_names_its_command(tmp_path: Path) -> None:
    folder = compared_runs(tmp_path / "runs")
    expected = (  # with the schedule of all criteria in earlier versions, which named none
        "headprune compare org/tiny-bert --data data.csv --schedule greedy "
        f"--criteria gnorm,his+mean,random --trials 2 --out {folder}"
    )
    assert commands(folder) == [expected]
    content = json.loads((folder / "comparison.json").read_text())
    (folder / "comparison.json").write_text(json.dumps(content["criteria"]))  # as it was written before
    assert commands(folder) == [expected]


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"criteria": [{"name": "gnorm", "runs": ["gnorm"]}]}'])
def test_runs_that_are_no_comparison_name_their_own_commands(tmp_path: Path, content: str) -> None:
    folder = compared_runs(tmp_path / "runs")
    (folder / "comparison.json").write_text(content)
    actual = commands(folder)
    assert len(actual) == 4
    for name in ("gnorm", "his+mean", "random-seed0", "random-seed1"):
        assert any(one.endswith(f"--out {folder / name}") for one in actual)
    assert f"--criterion gnorm --repair none --explore --out {folder / 'gnorm'}" in actual[0]


def test_a_run_of_a_comparison_by_itself_is_pruned(tmp_path: Path) -> None:
    folder = compared_runs(tmp_path / "runs")
    assert commands(folder / "his+mean")[0].startswith("headprune prune org/tiny-bert --data data.csv --criterion his")


def test_seeds_of_random_are_one_entry(tmp_path: Path) -> None:
    folder = compared_runs(tmp_path / "runs")
    make_run(folder / "random-seed0+lstsq", criterion="random", repair="lstsq", savings=False)
    make_run(folder / "random-seed1+lstsq", criterion="random(seed=1)", repair="lstsq", savings=False)
    actual = entries(load_runs([folder]))
    names = ["gnorm", "his+mean", "random (2 runs)", "random+lstsq (2 runs)"]
    assert sorted(entry.name for entry in actual) == names
    assert {len(entry.runs) for entry in actual if entry.is_random} == {2}
    page = write_report([folder], folder / "report.html").read_text()
    for name in names:
        assert page.count(f'<td class="name">{name}</td>') == 2  # a row for the metric, one for the agreement
    assert '<td class="name">random-seed0' not in page


@pytest.mark.parametrize(
    ("repairs", "names"),
    [
        (("lstsq", "none"), ["gnorm", "random, no repair"]),
        (("none", "lstsq"), ["gnorm", "random+lstsq"]),
        (("none", "none"), ["gnorm", "random"]),
    ],
)
def test_one_run_of_random_is_named_by_what_it_does(repairs: tuple[str, str], names: list[str], tmp_path: Path) -> None:
    """Its folder is called random-seed0+none or the like, which says little in a legend."""
    make_run(tmp_path / "runs" / "gnorm", criterion="gnorm", repair=repairs[0])
    make_run(tmp_path / "runs" / f"random-seed0+{repairs[1]}", criterion="random", repair=repairs[1])
    runs = load_runs([tmp_path / "runs"])
    assert [entry.name for entry in entries(runs)] == names
    save_figure(charts(runs, saved=True)["metric"], tmp_path, "metric")
    svg = (tmp_path / "metric.svg").read_text()
    assert f">{names[1]}</text>" in svg
    assert ">random-seed0" not in svg


def test_a_run_of_random_keeps_the_name_that_somebody_gave_it(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "chance", criterion="random", repair="none")
    make_run(tmp_path / "runs" / "random", criterion="gnorm", repair="none")
    make_run(tmp_path / "runs" / "random-seed3", criterion="random(seed=3)", repair="none", batch_size=4)
    assert [entry.name for entry in entries(load_runs([tmp_path / "runs"]))] == ["chance", "random", "random-seed3"]


def test_runs_of_random_alone(tmp_path: Path) -> None:
    """A page with one row: its mean and its spread, and nothing that it could be better than."""
    for seed in range(4):
        make_run(tmp_path / "runs" / f"r{seed}", seed=seed, criterion=f"random(seed={seed})", savings=False)
    runs = load_runs([tmp_path / "runs"])
    values = [run.steps[6].metric for run in runs]
    text = write_report([tmp_path / "runs"], tmp_path / "report.html").read_text()
    assert "4 runs: random (4 runs)." in text
    assert "Best" not in text.split("<script>")[0]
    assert f"<td>{sum(values) / 4:.2%}" in text
    assert f"<small>{100 * min(values):.1f}..{100 * max(values):.1f}</small>" in text


def test_which_runs_saw_the_same_samples(tmp_path: Path) -> None:
    same = load_runs([compared_runs(tmp_path / "runs")])
    assert len({run.samples for run in same}) == 1
    (tmp_path / "data.csv").write_text("text,label\na,0\n")
    options: dict[str, dict[str, Any]] = {
        "base": {},
        "seed": {"seed": 1},
        "count": {"evaluation_samples": 10},
        "calibrated on more": {"calibration_samples": 64},
        "labels": {"labels": "self"},
        "data": {"data": str(tmp_path / "data.csv")},
    }
    settings = {
        name: {"model": "m", "data": "d", **Experiment(model="m", data="d").settings(), **one}
        for name, one in options.items()
    }
    kinds = {RunView(name, tmp_path, {"settings": one}, []).samples for name, one in settings.items()}
    assert len(kinds) == len(options)
    apart = [{**settings["base"], "calibration": "c", "calibration_samples": n} for n in (8, 64)]
    assert len({RunView("x", tmp_path, {"settings": one}, []).samples for one in apart}) == 1


def test_the_page_of_a_comparison_says_what_is_real(tmp_path: Path) -> None:
    dense = [0.9] * 5 + [0.5] * 8
    good, poor = [0.9] * 9 + [0.5] * 4, [0.9, 0.8, 0.7] + [0.5] * 10
    for name, values in (("dense", dense), ("good", good), ("poor", poor)):
        make_run(tmp_path / "runs" / name, values=values, samples=100, savings=False)
    make_run(tmp_path / "runs" / "unknown", values=good, savings=False)
    text = write_report([tmp_path / "runs"], tmp_path / "report.html").read_text()
    assert "Best: <strong>good</strong>" in text
    assert "<p>good is ahead of dense by " in text
    assert "good and unknown cannot be paired: their values per sample are not known." in text
    low, high = wilson(90, 100)
    assert f"<td>90.00%<small>[{100 * low:.1f}, {100 * high:.1f}]</small>" in text
    assert "<td>90.00%</td>" in "".join(text.split('<td class="name">unknown</td>')[1].split("</tr>")[0].split("\n"))
