"""The strip of widths beside the mask of heads, in a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, Page, find_browser
from headprune.reports.figures import KEPT, NEW, REMOVED
from headprune.reports.page import charts, load_runs, write_report
from synthetic_runs import make_run

PROGRAM, MISSING = find_browser()
NEURONS = (1536, 1536, 3072)
LABELS = "[...document.querySelectorAll('#chart-widths svg .mark-text.role-mark text')].map(text => text.textContent)"


@pytest.fixture
def page() -> Iterator[Page]:
    if PROGRAM is None:
        pytest.skip(MISSING)
    with Browser(PROGRAM) as browser, browser.page() as page:
        yield page


def shown(page: Page, runs: list[Path], out: Path) -> None:
    page.open(write_report(runs, out), "document.body?.dataset.ready === 'yes'")


def bars(page: Page) -> list[tuple[str, float]]:
    """Colour and width of every part of a bar that can be seen."""
    measured: list[Any] = page.evaluate(
        "[...document.querySelectorAll('#chart-widths svg .mark-rect.role-mark path')]"
        ".map(bar => [bar.getAttribute('fill'), bar.getBBox().width])"
    )
    return [(colour, width) for colour, width in measured if width > 0.01]


def test_the_strip_follows_the_slider(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", neurons=NEURONS, stop=0.75)
    shown(page, [run], tmp_path / "page.html")
    steps = load_runs([run])[0].steps
    for step in (9, 0, 4):
        page.evaluate(
            f"(s => {{ s.value = {step}; s.dispatchEvent(new Event('input')); }})(document.getElementById('step'))"
        )
        expected = [f"{width:,}" if width else "empty" for width in steps[step].widths.values()]
        page.wait_for(f"{LABELS}.join(';') === '{';'.join(expected)}'")
        before = steps[max(0, step - 1)].widths
        full = max(width for _, width in bars(page)) if step == 0 else 190.0
        for colour, parts in (
            (KEPT, [width / dense for width, dense in zip(steps[step].widths.values(), NEURONS, strict=True)]),
            (NEW, [(before[s] - w) / d for (s, w), d in zip(steps[step].widths.items(), NEURONS, strict=True)]),
            (REMOVED, [1 - before[s] / d for s, d in zip(before, NEURONS, strict=True)]),
        ):
            actual = [width / full for measured, width in bars(page) if measured == colour]
            assert actual == pytest.approx([part for part in parts if part > 1e-4], abs=0.01)
    assert "empty" not in page.evaluate(LABELS)
    status = page.evaluate("document.getElementById('status').textContent")
    assert f"8 of 12 heads and {steps[4].neurons:,} of 6,144 neurons left" in status
    assert page.errors == []


def test_the_strip_hides_for_a_run_without_neurons(page: Page, tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "heads"), make_run(tmp_path / "both", neurons=NEURONS, seed=1)]
    shown(page, runs, tmp_path / "page.html")
    assert page.evaluate("document.getElementById('place-widths').hidden")
    page.evaluate("(s => { s.value = '1'; s.dispatchEvent(new Event('change')); })(document.getElementById('run'))")
    assert not page.evaluate("document.getElementById('place-widths').hidden")
    page.wait_for("document.querySelectorAll('#chart-widths svg .mark-text.role-mark text').length === 3")
    assert page.errors == []


def test_a_strip_is_a_valid_figure(tmp_path: Path) -> None:
    """Pages skip the check against the schema."""
    measured = charts(load_runs([make_run(tmp_path / "both", neurons=NEURONS)]))
    assert measured["widths-both"].to_dict(validate=True)["layer"]
