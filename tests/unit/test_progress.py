"""Progress inside long phases: what is reported, and how a terminal, a log and Python show it."""

from __future__ import annotations

import io
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import headprune
from headprune.cli import progress as cli_progress
from headprune.cli.progress import Display, LiveCurve, phase_row
from headprune.measure.trajectory import Step
from headprune.progress import Phase, phase_bar, report_phase, reporting_to, tracked
from headprune.reports.run_view import load_runs
from headprune.search.observers import Observer
from run_helpers import headprune as program
from run_helpers import material, prune_command
from score_helpers import labelled
from synthetic_runs import make_run
from zoo import ZOO

SAMPLES = 6


class Recorder(Observer):
    """All phases and steps of a run, in their order."""

    def __init__(self) -> None:
        self.events: list[Phase | Step] = []

    def phase(self, phase: Phase) -> None:
        self.events.append(phase)

    def step(self, step: Step, seconds: Any) -> None:
        self.events.append(step)


def phases_of(**options: Any) -> list[list[Phase]]:
    """The phases before each step of a run."""
    recorder, model = Recorder(), ZOO["bert"].build()
    batches = [labelled(ZOO["bert"], seed) for seed in range(2)]
    assert sum(len(batch["input_ids"]) for batch in batches) == SAMPLES
    headprune.prune(model, batches, evaluation=batches, observers=[recorder], **options)
    steps = [index for index, event in enumerate(recorder.events) if isinstance(event, Step)]
    starts = [0, *(index + 1 for index in steps)]
    return [
        [phase for phase in recorder.events[start:end] if isinstance(phase, Phase)]
        for start, end in itertools.pairwise([*starts[:-1], steps[-1]])
    ]


def test_tracked_items_are_counted_when_they_are_done() -> None:
    reported: list[Phase] = []
    with reporting_to(reported.append):
        assert list(tracked("abc", "reading", 6, unit="letter", size=lambda letter: "abc".index(letter) + 1)) == [
            *"abc"
        ]
    assert [(phase.done, str(phase)) for phase in reported] == [
        (done, f"reading, {done} of 6 letters") for done in (0, 1, 3, 6)
    ]
    report_phase(Phase("nobody listens"))
    assert len(reported) == 4


def test_every_phase_of_a_round_says_how_far_it_is() -> None:
    """A round scores, repairs every site and evaluates; each of these is counted from nothing to all."""
    *_, last = phases_of(keep_flops=0.6, rounds=2)
    totals = {name: list(group) for name, group in itertools.groupby(last, lambda phase: phase.name)}
    assert list(totals) == ["scoring", "computing scores", "repairing", "evaluating"]
    for phases in totals.values():
        done = [phase.done for phase in phases]
        assert done[0] == 0
        assert done == sorted(done)
        assert done[-1] == phases[-1].total
    assert totals["scoring"][-1].total == totals["evaluating"][-1].total == SAMPLES
    assert len(totals["evaluating"]) == 1 + 2  # at its start, and after each batch
    sites = len(headprune.inspect(ZOO["bert"].build()).sites)
    assert totals["repairing"][-1].unit == "site"
    assert totals["repairing"][-1].total >= sites


def test_the_table_of_times_is_measured_with_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It comes before the first step, and takes minutes for a large model."""
    monkeypatch.setenv("HEADPRUNE_CACHE", str(tmp_path))
    first, *rounds = phases_of(speedup=1.1, rounds=1, latency_batch=1, latency_tokens=4)
    assert "timing layers" in [phase.name for phase in first]
    assert "timing the model" in [phase.name for phase in rounds[0]]


def test_units_removed_one_by_one_report_their_phases() -> None:
    _, *steps = phases_of(criterion="gnorm", keep=0.5)
    for step in steps:
        assert {phase.name for phase in step} == {"scoring", "gathering activations", "evaluating"}


def a_step(tmp_path: Path) -> Step:
    return load_runs([make_run(tmp_path / "run", values=[0.9] * 13, samples=100)])[0].steps[0]


def test_a_log_has_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One in ten seconds; a step does not wait for the lines of phases."""
    now = 100.0
    monkeypatch.setattr(cli_progress.time, "monotonic", lambda: now)
    console = Console(file=io.StringIO(), width=200)
    curve = LiveCurve("Pruning", Display(console, None))
    curve.phase(Phase("loading the model"))
    for second in range(25):
        now = 100.0 + second
        curve.phase(Phase("scoring", second, 25, "sample"))
    curve.step(a_step(tmp_path), {})
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[:2] == ["Pruning: scoring, 11 of 25 samples, 11 s", "Pruning: scoring, 22 of 25 samples, 22 s"]
    assert len(lines) == 3
    assert "metric 0.9000" in lines[2]


def test_a_log_has_lines_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_progress, "LINE_SECONDS", 0)
    console = Console(file=io.StringIO(), width=200)
    display = Display(console, None)
    with display.repeating():
        LiveCurve("Pruning", display).phase(Phase("loading the model"))
        while console.file.getvalue().count("\n") < 2:  # type: ignore[attr-defined]
            time.sleep(0.01)
    assert {line.partition(",")[0] for line in console.file.getvalue().splitlines()} == {  # type: ignore[attr-defined]
        "Pruning: loading the model"
    }


def test_a_terminal_shows_a_bar_of_the_phase_below_the_curve(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    console.print(phase_row("", Phase("scoring", 1, 2, "sample")))
    text, _, bar = console.file.getvalue().rstrip().rpartition(" ")  # type: ignore[attr-defined]
    assert text == "scoring, 1 of 2 samples"
    assert set(bar) <= {"\u2501", "\u2578", "\u257a"}
    assert bar
    curve = LiveCurve("Pruning", Display(console, None))
    curve.current_phase = Phase("loading the model")
    assert rendered(curve) == ["Pruning: loading the model"]
    curve.step(a_step(tmp_path), {})
    curve.phase(Phase("scoring", 1, 2, "sample"))
    lines = rendered(curve)
    assert len(lines) > 5
    assert lines[-1].startswith("scoring, 1 of 2 samples")


def rendered(curve: LiveCurve) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    console.print(curve.render())
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_the_phases_of_a_whole_run_are_in_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_progress, "LINE_SECONDS", -1)
    files = material()
    log = program(*prune_command(files.bert, files.data_csv, tmp_path / "run", "--keep-flops", "0.7")).err
    for phase in ("loading the model", "scoring", "repairing", "evaluating", "saving the model", "writing the report"):
        assert f": {phase}" in log


def test_a_bar_of_python_names_the_phase(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headprune.progress.LINE_SECONDS", 0)
    headprune.prune(
        ZOO["bert"].build(), [labelled(ZOO["bert"], 0)], keep_flops=0.7, rounds=1, progress=True, criterion="magnitude"
    )
    log = capsys.readouterr().err
    assert "Pruning by magnitude: evaluating" in log or "Pruning by magnitude: scoring" in log
    assert "Pruning by magnitude: repairing" in log


def test_a_bar_that_is_not_shown_leaves_the_listener_of_the_caller() -> None:
    reported: list[Phase] = []
    with reporting_to(reported.append), phase_bar("hidden", show=False):
        report_phase(Phase("scoring"))
    assert reported == [Phase("scoring")]
