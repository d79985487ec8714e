"""The report's page as a browser shows it: what is drawn, what moves, on which screens, whatever the data."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, Page, find_browser
from headprune.reports.page import write_report
from headprune.reports.run_view import load_runs
from synthetic_runs import EVIL, make_run

READY = "document.body && document.body.dataset.ready === 'yes'"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program, reason = find_browser()
    if program is None:
        pytest.skip(reason)
    with Browser(program) as running:
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A desktop page; at the end of every test it has had no errors, and asked for its own file alone."""
    with browser.page() as opened:
        opened.emulate()
        yield opened
        assert opened.errors == []
        assert opened.warnings == []
        assert opened.dialogs == []
        assert len(set(opened.requests)) == 1, opened.requests
        assert opened.requests[0].startswith("file://")


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison: gnorm, his and fifty random trials."""
    folder = tmp_path_factory.mktemp("many")
    for number, name in enumerate(("gnorm", "his")):
        make_run(folder / name, (12,) * 6, every=2, seed=number, savings=False, criterion=name)
    for trial in range(50):
        spec = f"random(seed={trial})"
        make_run(folder / f"random-{trial}", (12,) * 6, every=2, seed=9 + trial, savings=False, criterion=spec)
    return folder


@pytest.fixture(scope="module")
def many_page(many: Path) -> Path:
    return write_report([many / "gnorm", many], many / "report.html")


def show(page: Page, *runs: Path) -> Page:
    page.open(write_report(runs, runs[0].parent / "report.html"), READY)
    return page


def settle(page: Page) -> None:
    """Charts draw in the next frames."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 60)))")


def cells(page: Page, chart: str = "mask") -> list[str]:
    return page.evaluate(
        f"[...document.querySelectorAll('#chart-{chart} svg .mark-rect.role-mark path')]"
        ".map(cell => cell.getAttribute('fill'))"
    )


def point(page: Page, chart: str = "metric") -> list[float]:
    """Where the filled point is: the last symbol in the plot."""
    place = page.evaluate(
        f"[...document.querySelectorAll('#chart-{chart} svg .mark-symbol.role-mark path')].at(-1)"
        ".getAttribute('transform')"
    )
    return [float(number) for number in place.removeprefix("translate(").rstrip(")").split(",")]


def status(page: Page) -> str:
    return page.evaluate("document.getElementById('status').textContent")


def move(page: Page, step: int) -> None:
    page.evaluate(
        f"{{ const s = document.getElementById('step'); s.value = {step}; s.dispatchEvent(new Event('input')); }}"
    )
    settle(page)


def rings(page: Page) -> int:
    """Rings mark the stop; they have a stroke and no filling."""
    return page.evaluate(
        "[...document.querySelectorAll('#chart-metric svg .mark-symbol.role-mark path')]"
        ".filter(mark => mark.getAttribute('fill') === 'transparent' || mark.getAttribute('fill') === 'none').length"
    )


def legend(page: Page, chart: str = "metric") -> list[str]:
    return page.evaluate(
        f"[...document.querySelectorAll('#chart-{chart} svg .role-legend-label text')].map(text => text.textContent)"
    )


def bands(page: Page) -> list[list[str]]:
    """Colour and opacity of the bands of intervals."""
    return page.evaluate(
        "[...document.querySelectorAll('#chart-metric svg .mark-area path')]"
        ".map(area => [area.getAttribute('fill'), area.getAttribute('fill-opacity') ?? area.getAttribute('opacity')])"
    )


# --- one run ---


def test_one_run_is_drawn_with_its_stop(page: Page, tmp_path: Path) -> None:
    show(page, make_run(tmp_path / "run"))
    for chart in ("metric", "agreement"):
        assert page.evaluate(f"document.querySelectorAll('#chart-{chart} svg .mark-line path').length") == 1
    assert rings(page) == 1
    assert cells(page).count("#0072B2") == 6
    assert status(page).startswith("Step 6 of 12, the stop: 6 of 12 heads left, accuracy ")
    text = page.evaluate("document.body.innerText")
    for expected in ("6 of 12 heads removed", "Savings", "batch of 32", "embeddings", "torch version", "4% of"):
        assert expected in text.replace("\n", " ")
    assert "headprune prune org/tiny-bert --data data.csv --out" in text


def test_steps_of_many_sizes_are_dots(page: Page, tmp_path: Path) -> None:
    """A line between few points would not tell where it was measured; of even steps it does."""
    counted = (
        "[...document.querySelectorAll('#chart-metric svg .mark-symbol.role-mark path')]"
        ".filter(mark => mark.getAttribute('fill') === '{colour}').length"
    )
    runs = [make_run(tmp_path / "even", every=3), make_run(tmp_path / "uneven", sizes=(1, 2, 4, 5))]
    show(page, *runs)
    assert page.evaluate(counted.format(colour="#D55E00")) == 5
    assert page.evaluate(counted.format(colour="#0072B2")) == 1  # the chosen step
    assert "dots: steps" in page.evaluate("document.querySelector('#chart-metric').textContent")
    show(page, runs[0])
    assert page.evaluate(counted.format(colour="#0072B2")) == 1
    assert "dots: steps" not in page.evaluate("document.querySelector('#chart-metric').textContent")


def test_intervals_are_bands(page: Page, tmp_path: Path) -> None:
    """As faint as can be seen, in the colour of their line; where a run does not know them, there is none."""
    runs = [make_run(tmp_path / name, samples=100, criterion=name) for name in ("gnorm", "his")]
    show(page, *runs, make_run(tmp_path / "unknown", criterion="hies"))
    assert bands(page) == [["#0072B2", "0.12"], ["#D55E00", "0.12"]]
    assert legend(page) == ["gnorm", "his", "unknown"]
    step = load_runs(runs[:1])[0].steps[6]
    assert step.interval is not None
    low, high = (f"{100 * end:.1f}" for end in step.interval)
    assert f"accuracy {step.metric:.2%} [{low}, {high}], agreement" in status(page)
    show(page, tmp_path / "unknown")
    assert bands(page) == []
    assert "[" not in status(page)


def test_two_seeds_of_random_are_thin_lines_with_one_name(page: Page, tmp_path: Path) -> None:
    for seed in range(2):
        make_run(tmp_path / "runs" / f"r{seed}", seed=seed, criterion=f"random(seed={seed})", samples=64)
    make_run(tmp_path / "runs" / "gnorm", criterion="gnorm", samples=64)
    page.open(write_report([tmp_path / "runs"], tmp_path / "report.html"), READY)
    assert legend(page) == ["gnorm", "random (2 runs)"]
    lines = page.evaluate(
        "[...document.querySelectorAll('#chart-metric svg .mark-line path')]"
        ".map(line => [line.getAttribute('stroke'), line.getAttribute('stroke-width')])"
    )
    assert sorted(lines) == [["#0072B2", "2"], ["#8a8a8a", "1.2"], ["#8a8a8a", "1.2"]]
    assert bands(page) == [["#0072B2", "0.12"]]


def test_slider_moves_mask_status_and_point(page: Page, tmp_path: Path) -> None:
    show(page, make_run(tmp_path / "run"))
    seen = []
    for step in (0, 1, 5, 12):
        move(page, step)
        colours = cells(page)
        assert colours.count("#D55E00") == (1 if step else 0)
        assert colours.count("#0072B2") == 12 - step
        assert status(page).startswith(f"Step {step} of 12")
        assert page.evaluate("document.querySelector('#chart-mask svg').textContent").count(f"after step {step}") == 1
        seen.append((point(page), point(page, "agreement"), status(page), cells(page, "scores")))
    assert [where[0][0] for where in seen] == sorted({where[0][0] for where in seen})
    for one, other in itertools.pairwise(seen):
        assert all(a != b for a, b in zip(one, other, strict=True))
    page.evaluate("document.getElementById('to-stop').click()")
    assert ", the stop" in status(page)


def test_keys_move_the_slider(page: Page, tmp_path: Path) -> None:
    show(page, make_run(tmp_path / "run"))
    for _ in range(6):  # by tabs alone
        page.press("Tab")
        if page.evaluate("document.activeElement.id") == "step":
            break
    page.press("Home")
    settle(page)
    before = point(page), cells(page)
    assert status(page).startswith("Step 0 of 12")
    for _ in range(3):
        page.press("ArrowRight")
    settle(page)
    assert status(page).startswith("Step 3 of 12")
    assert cells(page).count("#0072B2") == 9
    assert point(page)[0] > before[0][0]
    page.press("ArrowLeft")
    assert status(page).startswith("Step 2 of 12")
    page.press("End")
    assert status(page).startswith("Step 12 of 12")


def test_scores_are_shaded_by_rank(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    show(page, run)
    move(page, 1)
    shades = cells(page, "scores")
    scores = load_runs([run])[0].steps[1].scores
    assert scores is not None
    flat = scores.flatten().tolist()
    # viridis: the least important is dark violet, the most important yellow
    assert shades[flat.index(min(flat))] == "rgb(68, 1, 84)"
    assert shades[flat.index(max(flat))] == "rgb(253, 231, 37)"
    move(page, 0)
    assert len(set(cells(page, "scores"))) == 1
    assert "nothing was scored" in page.evaluate("document.getElementById('note').textContent")


def test_many_runs_with_random_trials_as_boxes(page: Page, many_page: Path) -> None:
    page.open(many_page, READY)
    for chart in ("metric", "agreement"):
        lines = page.evaluate(f"document.querySelectorAll('#chart-{chart} svg .mark-line path').length")
        boxes = page.evaluate(
            f"[...document.querySelectorAll('#chart-{chart} svg .mark-rect.role-mark path')]"
            ".filter(box => box.getAttribute('fill') === '#8a8a8a').length"
        )
        assert lines == 2
        assert 12 <= boxes <= 24
    assert rings(page) == 2
    text = page.evaluate("document.body.innerText")
    assert "52 runs: gnorm, his and random (50 runs)." in text
    assert legend(page) == ["gnorm", "his", "random (50 runs)"]
    assert page.evaluate("document.querySelectorAll('#run option').length") == 52


def test_choosing_another_run(page: Page, many_page: Path) -> None:
    page.open(many_page, READY)
    move(page, 9)
    before = cells(page), point(page)
    for index in (1, 20):
        page.evaluate(
            f"{{ const s = document.getElementById('run'); s.value = {index}; s.dispatchEvent(new Event('change')); }}"
        )
        move(page, 9)
        after = cells(page), point(page)
        assert after[0] != before[0]
        assert after[1][0] == before[1][0]
        assert after[1][1] != before[1][1]
        assert after[0].count("#0072B2") == 72 - 18
        name = page.evaluate("document.getElementById('run').selectedOptions[0].textContent")
        assert name in page.evaluate("document.querySelector('#chart-mask svg').textContent")
        before = after


# --- screens, paper ---


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_screens(browser: Browser, many_page: Path, width: int, dark: bool) -> None:
    with browser.page() as page:
        page.emulate(width=width, dark=dark)
        page.open(many_page, READY)
        settle(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelector('#chart-metric svg').getBoundingClientRect().right") <= width
        ink = page.evaluate("getComputedStyle(document.querySelector('#chart-metric svg .role-axis-label text')).fill")
        assert ink == ("rgb(236, 236, 236)" if dark else "rgb(27, 27, 27)")
        assert page.errors == []


def test_paper(browser: Browser, tmp_path: Path) -> None:
    """Printed in dark mode, the ink is dark all the same."""
    with browser.page() as page:
        page.emulate(dark=True)
        show(page, make_run(tmp_path / "run"))
        content = page.pdf(tmp_path / "page.pdf").read_bytes()
        sizes = set(re.findall(rb"/MediaBox ?\[0 0 ([\d.]+) ([\d.]+)\]", content))
        assert sizes == {(b"612", b"792")}  # letter
        assert b"/Title (headprune: tiny-bert)" in content
        assert len(content) > 20_000
        page.call(
            "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
        )
        ink = page.evaluate("getComputedStyle(document.querySelector('#chart-metric svg .role-axis-label text')).fill")
        assert ink == "rgb(27, 27, 27)"
        assert page.evaluate("getComputedStyle(document.querySelector('.controls')).display") == "none"


# --- names and shapes from data ---


def test_names_are_text(page: Page, tmp_path: Path) -> None:
    odd = tmp_path / "run<b>x'\"&"
    make_run(odd, measured=EVIL, metric=EVIL, model=EVIL, data=EVIL)
    make_run(tmp_path / "other")
    for folder in (odd, tmp_path / "other"):  # as a plugin's criterion that is not there any more
        record = json.loads((folder / "run.json").read_text())
        record["settings"]["criterion"] = EVIL
        record["result"]["rule"] = EVIL
        (folder / "run.json").write_text(json.dumps(record))
    out = write_report([odd, tmp_path / "other"], tmp_path / "report.html")
    page.open(out, READY)
    move(page, 2)
    assert page.evaluate("document.querySelectorAll('img, b').length") == 0
    assert page.evaluate("document.querySelectorAll('script').length") == 2
    assert EVIL in page.evaluate("document.body.innerText")
    assert odd.name in page.evaluate("document.querySelector('#run').textContent")
    assert EVIL in status(page)


ODD: dict[str, dict[str, Any]] = {
    "step 0 only": {"steps": 0, "stop": 0},
    "step 0 only, unfinished": {"steps": 0, "stop": None},
    "unfinished": {"stop": None},
    "unfinished, no numbers": {"stop": None, "scores": math.nan},
    "no numbers": {"values": [0.9] + [math.nan] * 12, "scores": math.nan},
    "no numbers at all": {"values": [math.nan] * 13, "scores": math.nan},
    "equal scores": {"scores": 0.5},
    "infinite perplexity": {"values": [8.0] * 6 + [math.inf] * 7, "measured": "perplexity"},
    "384 heads": {"heads": (16,) * 24, "every": 4},
    "one site": {"heads": (12,)},
    "one head": {"heads": (1,)},
    "ragged": {"heads": (2, 5, 3)},
    "32 heads wide": {"heads": (32, 32)},
    "no savings": {"savings": False},
    "one sample": {"samples": 1},
    "all right": {"samples": 8, "values": [1.0] * 13},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_runs(page: Page, tmp_path: Path, name: str) -> None:
    options = ODD[name]
    page.emulate(width=390)
    show(page, make_run(tmp_path / "run", **options))
    count = sum(options.get("heads", (4, 4, 4)))
    known = 0 if name == "step 0 only, unfinished" else count
    assert len(cells(page)) == known
    last = int(page.evaluate("document.getElementById('step').max"))
    for step in {0, min(1, last), last}:
        move(page, step)
        assert status(page).startswith(f"Step {step} of {last}")
        assert len(cells(page)) == known
    assert "nan" not in page.evaluate("document.body.innerText").lower()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    unmarked = any(word in name for word in ("unfinished", "no numbers", "infinite"))
    assert rings(page) == (0 if unmarked else 1)
