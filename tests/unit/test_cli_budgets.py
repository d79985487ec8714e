"""Budgets and neurons on the command line: what is printed, what JSON says, and which verbs take what."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

import headprune
from headprune.cli.budget_points import print_points
from headprune.cli.main import app
from headprune.cli.progress import Display, LiveCurve
from headprune.reports.run_view import load_runs
from run_helpers import headprune as program
from run_helpers import material, prune_command, steps_of
from synthetic_runs import make_run

QUICK = ("--rounds", "2", "--round-to", "1")
VERBS: Any = typer.main.get_command(app)


def options(verb: str) -> set[str]:
    return {parameter.name for parameter in VERBS.commands[verb].params}


def test_prune_and_compare_take_budgets() -> None:
    budgets = {"keep_parameters", "keep_flops", "keep_memory", "speedup", "latency_batch", "latency_tokens", "threads"}
    budgets |= {"units", "method", "rounds", "round_to", "widths"}
    assert options("prune") >= budgets
    assert options("score") & budgets == {"units"}
    assert budgets - options("compare") == {"method"}  # which is a criterion already


def test_json_and_tables_of_several_points(tmp_path: Path) -> None:
    m, out = material(), tmp_path / "run"
    command = prune_command(m.bert, m.data_csv, out, "--keep-flops", "0.8,0.6", *QUICK)
    actual = program(*command, "--json").json
    record = json.loads((out / "run.json").read_text())
    assert actual["units"] == record["result"]["units"]
    assert actual["units"]["heads"][0] == 12
    assert actual["units"]["neurons"] == [60, record["points"][-1]["units"]["neurons"]]
    assert actual["points"] == record["points"]
    assert actual["shares"] == record["savings"]["shares"]
    assert actual["shares"]["flops"] <= 0.6
    shown = " ".join(program(*command).out.split())  # finished: nothing is computed again
    heads, neurons = (actual["units"][kind][0] - actual["units"][kind][1] for kind in ("heads", "neurons"))
    gone = [f"{count} of {total} {kind}" for count, total, kind in ((heads, 12, "heads"), (neurons, 60, "neurons"))]
    assert f"Removed {' and '.join(part for part in gone if not part.startswith('0 '))}: accuracy" in shown
    for point in record["points"]:
        assert point["label"] in shown
        assert f"{point['shares']['flops']:.1%}" in shown
    assert "The folders are in" in shown


def test_json_of_a_single_point_has_shares_alone(tmp_path: Path) -> None:
    m = material()
    actual = program(
        *prune_command(m.bert, m.data_csv, tmp_path / "run", "--keep-parameters", "0.8", *QUICK, "--json")
    ).json
    assert actual["shares"].keys() == {"parameters", "flops", "latency"}
    assert actual["shares"]["parameters"] <= 0.8
    assert "points" not in actual
    assert not (tmp_path / "run" / "models").exists()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_measured_speed_up_stands_beside_the_one_asked_for(width: int) -> None:
    shares = [{"parameters": 0.8, "flops": 0.7, "latency": 1 / speed} for speed in (1.48, 2.03)]
    units = {"heads": [144, 70], "neurons": [36_864, 12_000]}
    points = [
        {
            "label": f"speedup-{asked}",
            "step": step,
            "model": f"models/speedup-{asked}",
            "metric": 0.9,
            "interval": [0.88, 0.92],
            "units": {kind: left for kind, (_, left) in units.items()},
            "shares": own,
        }
        for step, (asked, own) in enumerate(zip(("1.5", "2"), shares, strict=True), 3)
    ]
    result = {"step": 4, "metric": "accuracy", "pruned": 0.9, "units": units}
    record: dict[str, Any] = {"settings": {"speedup": [1.5, 2.0]}, "result": result, "points": points}
    text = io.StringIO()
    print_points(record, Path("RUN"), Console(file=text, width=width))
    said = " ".join(text.getvalue().split())
    assert "target 1.5x, measured 1.48x; target 2.0x, measured 2.03x." in said
    if width >= 80:
        assert "\u2026" not in said
        assert "12,000" in said
        assert "of 36,864" in said
    single = {**record, "settings": {"speedup": [2.0]}, "points": [], "savings": {"shares": shares[1]}}
    text = io.StringIO()
    print_points(single, Path("RUN"), Console(file=text, width=width))
    assert " ".join(text.getvalue().split()) == "The budget: target 2.0x, measured 2.03x."
    # A rule to stop may end a run between its points: what it has is still listed, and is not the result.
    text = io.StringIO()
    print_points({**record, "points": points[:1]}, Path("RUN"), Console(file=text, width=width))
    assert "speedup-1.5" in text.getvalue() or width < 80
    assert "The folders are in RUN/models." in " ".join(text.getvalue().split())


def test_scores_of_heads_and_neurons(tmp_path: Path) -> None:
    m = material()
    command = ("score", m.bert, "--data", m.data_csv, "--criterion", "his", "--units", "heads,neurons")
    actual = program(*command, "--json").json
    assert actual["kinds"] == ["heads"] * 3 + ["neurons"] * 3
    assert [len(row) for row in actual["scores"]] == [4, 4, 4, 20, 20, 20]
    batches = headprune.data.load_examples(headprune.load(m.bert), m.data_csv, processor=m.bert).batches(32)
    expected = headprune.score(headprune.load(m.bert), batches, criterion="his", units="heads,neurons").scores
    assert actual["scores"][5] == pytest.approx(expected[5, :20].tolist())
    assert actual["scores"][0] == pytest.approx(expected[0, :4].tolist())
    assert "20 neurons, the least to the most important" in program(*command).out
    heads = program("score", m.bert, "--data", m.data_csv, "--json").json
    assert "kinds" not in heads
    assert [len(row) for row in heads["scores"]] == [4, 4, 4]
    refused = program("score", m.bert, "--data", m.data_csv, "--criterion", "gnorm", "--units", "neurons")
    assert refused.code == 2
    assert "gnorm has no score for neurons" in " ".join(refused.err.split())


def test_inspect_lists_feed_forward_sites(tmp_path: Path) -> None:
    m, out = material(), tmp_path / "run"
    assert (
        program(*prune_command(m.bert, m.data_csv, out, "--keep-flops", "0.5", "--units", "neurons,heads", *QUICK)).code
        == 0
    )
    left = list(steps_of(out)[-1]["widths"].values())
    assert sum(left) < 60
    actual = program("inspect", out / "model", "--json").json
    assert [site["kind"] for site in actual["sites"]] == ["heads"] * 3
    fields = ("path", "kind", "place", "neurons", "original_neurons", "applications")
    assert [tuple(site[name] for name in fields) for site in actual["feed_forward"]] == [
        (f"bert.encoder.layer.{number}", "neurons", "encoder feed-forward", width, 20, 1)
        for number, width in enumerate(left)
    ]
    # A neuron has a row of 24 weights and a bias before it, and a column of 24 weights after it.
    assert actual["parameters"]["neurons"] == sum(left) * (24 + 1 + 24)
    tokens = actual["flops"]["tokens"]
    assert actual["flops"]["neurons"] == sum(left) * tokens * 2 * (24 + 24)
    shown = program("inspect", out / "model").out
    assert "Feed-forward sites in bert.encoder.layer" in " ".join(shown.split())
    for width in left:
        assert f"{width} / 20" in shown
    said = " ".join(shown.split())
    assert f"The {sum(left)} neurons of its 3 feed-forward layers hold" in said


def test_live_progress_of_heads_and_neurons(tmp_path: Path) -> None:
    """The curve goes along the FLOPs of the whole model, and the line says what is left in the budget's measure."""
    (run,) = load_runs([make_run(tmp_path / "run", neurons=(100, 100), values=[0.9] * 13)])
    whole = 2 * run.steps[0].flops
    steps = [
        dataclasses.replace(
            step, model_flops=whole - run.steps[0].flops + step.flops, latency=0.5 if step.step else None
        )
        for step in run.steps
    ]
    curve = LiveCurve("x", Display(Console(file=io.StringIO()), None), "flops")
    curve.steps = steps[:7]
    last = steps[6]
    share = last.model_flops / whole
    assert curve.status().plain.startswith(
        f"x: 6 of 12 heads and {last.neurons} of 200 neurons left, {share:.1%} of the FLOPs, metric 0.9000"
    )
    *bars, axis = (line.plain[8:] for line in curve.curve())
    assert axis.startswith("0% of the FLOPs removed")
    assert axis.endswith("100%")
    assert len(bars[-1].rstrip()) == round((1 - share) * 64) + 1
    for measure, said in (("latency", "50.0% of the time"), ("parameters", "of the parameters"), ("memory", "memory")):
        curve.measure = measure
        assert said in curve.status().plain
    heads = LiveCurve("x", Display(Console(file=io.StringIO()), None))
    heads.steps = load_runs([make_run(tmp_path / "heads", values=[0.9] * 13)])[0].steps[:4]
    assert heads.status().plain.startswith("x: 3 of 12 heads removed, metric")
    assert heads.curve()[-1].plain.startswith(" " * 8 + "0 heads removed")
