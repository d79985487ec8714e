"""Reproduces published tables and figures: `headprune reproduce`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headprune.checkpoint.atomic_files import path_exists, write_text
from headprune.extras import require
from headprune.papers import gradients
from headprune.papers.authors_files import authors_findings
from headprune.papers.figure_data import Panel
from headprune.papers.figures import figure3, figure4, figure5
from headprune.papers.panels_from_runs import run_panels
from headprune.papers.paper_models import MODELS, ReproductionError
from headprune.papers.protocol import PROTOCOLS
from headprune.papers.published import MASKS, ORDERS, mask_of_order, published_panels, read_masks, read_orders
from headprune.papers.tables import make_tables
from headprune.reports.save_figures import save_figure

with require("cli", "Reproducing a paper needs"):
    from rich.console import Console

__all__ = ["ReproductionError", "reproduce_greedy_gnorm"]

PUBLISHED_SOURCE = "Data: published by the authors."
RUNS_SOURCE = "Data: runs of headprune."


def reproduce_greedy_gnorm(
    out: Path,
    *,
    published: Path | None = None,
    figure2: tuple[str | Path, str | Path] | None = None,
    head: tuple[int, int] | None = None,
    runs: Path | None = None,
    console: Console | None = None,
) -> list[Path]:
    """Write tables 1 to 5, the figures for which there is data, and the protocol to `out`; returns the files.

    `published` is a folder with the authors' result files, `runs` one with runs of headprune (MODEL/.../RUN): figures
    3 to 5 are drawn from either, or from both under two names. `figure2` is a model folder and a data file to measure
    gradients on, by default the model of the demo, where its packages are installed; `head` is the (site, head) that it
    removes, by default the one that Greedy-Gnorm removes first.
    """
    console = console or Console()
    if path_exists(out, ReproductionError) and not out.is_dir():
        raise ReproductionError(f"{out} is a file; choose a directory for the tables and figures.")
    charts, notes = _curves_and_masks(published, runs)
    found = None if published is None else authors_findings(published)
    task = gradients.demo_task() if figure2 is None else gradients.load_task(*figure2)
    name = gradients.DEMO_NAME if figure2 is None else Path(figure2[0]).name
    if task is None:
        notes.append(
            "Figure 2 was left out: name a model and data with --model and --data, or install headprune[demo]."
        )
    else:
        charts["figure2"] = gradients.figure2(gradients.measure_change(task, name, head=head))
    # All input has been read and checked: from here on files are written.
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        files = _write_tables(out)
        if found is not None:
            files.append(out / "authors_files.json")
            write_text(files[-1], json.dumps(found, indent=2) + "\n")
        for name, chart in sorted(charts.items()):
            files += save_figure(chart, out / "figures", name)
    except OSError as error:
        raise ReproductionError(f"Cannot write to {out}: {error.strerror}; choose another directory.") from None
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)
    console.print(
        f"{len(files)} files are in {out}: tables 1 to 5, {_join_names(charts)}.", highlight=False, soft_wrap=True
    )
    return files


def _curves_and_masks(published: Path | None, runs: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Figures 3 to 5 by file name, and notes about them."""
    charts: dict[str, Any] = {}
    notes = []
    if published is not None:
        charts.update(_draw(published_panels(published), PUBLISHED_SOURCE, ""))
        notes.append(_masks_note(published))
    if runs is not None:
        run_charts = _draw(run_panels(runs), RUNS_SOURCE, "" if published is None else "-runs")
        missing = [
            name for name in ("figure3", "figure4", "figure5") if not any(key.startswith(name) for key in run_charts)
        ]
        notes += [f"{runs} has no runs to draw {name} from." for name in missing]
        charts.update(run_charts)
    if published is None and runs is None:
        notes.append(
            "Figures 3, 4 and 5 were left out: give --published with a folder of the authors' result files, or --runs "
            "with runs of headprune, which headprune reproduce greedy-gnorm --run MODEL --out RUNS makes."
        )
    return charts, notes


def _draw(panels: Sequence[Panel], source: str, suffix: str) -> dict[str, Any]:
    figures = {
        "figure3": figure3(panels, source),
        "figure4": figure4(panels, source),
        "figure5": figure5(panels, source),
    }
    return {name + suffix: chart for name, chart in figures.items() if chart is not None}


def _masks_note(published: Path) -> str:
    masks, orders = read_masks(published), read_orders(published)
    if masks is None and orders is None:
        return (
            f"Figure 5 was left out: {published} has neither {MASKS} nor {ORDERS}, which the authors' notebooks print."
        )
    if masks is None or orders is None:
        return f"The final masks were not compared with the removal orders: {published} has one of the two files."
    wrong = [model.title for model in MODELS if mask_of_order(model, orders[model.key]) != masks[model.key]]
    if wrong:
        return f"The published orders and final masks disagree for {', '.join(wrong)}."
    counts = ", ".join(str(model.removed) for model in MODELS)
    return f"The first {counts} heads of the published orders give exactly the published final masks."


def _write_tables(out: Path) -> list[Path]:
    files = []
    for table in make_tables():
        for suffix, text in (("md", table.markdown()), ("csv", table.csv())):
            files.append(out / f"{table.name}.{suffix}")
            write_text(files[-1], text)
    files.append(out / "protocol.json")
    write_text(files[-1], json.dumps([protocol.to_json() for protocol in PROTOCOLS], indent=2) + "\n")
    return files


def _join_names(charts: dict[str, Any]) -> str:
    return ", ".join(sorted(charts)) or "no figures"
