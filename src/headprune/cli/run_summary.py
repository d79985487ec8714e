"""Prints the summary of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headprune.cli.budget_points import print_points
from headprune.reports import gate_training
from headprune.reports.format import (
    calibration_text,
    measured_text,
    removed_text,
    scored_samples_text,
    stop_text,
    value_text,
    vocabulary_text,
)
from headprune.reports.savings import how_timed, savings_rows


def print_run(out: Path, record: Mapping[str, Any], console: Console | None = None) -> None:
    """Print what was removed, the metric, the savings, and the folders."""
    console = console or Console()
    result = record["result"]
    name = result["metric"]
    dense = measured_text(name, result["dense"], result.get("dense_interval"))
    pruned = measured_text(name, result["pruned"], result.get("pruned_interval"))
    console.print(
        f"Removed [bold]{removed_text(result)}[/bold]: {escape(f'{name} {dense} -> ')}[bold]{escape(pruned)}[/bold], "
        f"agreement with the dense model {value_text('agreement', result['agreement'])}",
        highlight=False,
    )
    settings = record["settings"]
    method = f"Criterion {settings['criterion']}, repair {settings.get('repair', 'none')}"
    if settings.get("gates"):
        text = gate_training.how(record)
        method = text[0].upper() + text[1:]
    stopped = f" {stop_text(result)}" if stop_text(result) else ""
    console.print(
        f"{method}.{stopped}",
        highlight=False,
        markup=False,
    )
    for text in (
        _nothing_left(result),
        vocabulary_text(record),
        scored_samples_text(settings),
        calibration_text(record),
    ):
        if text:
            console.print(text, highlight=False, markup=False)
    saved = record.get("savings")
    print_points(record, out, console)
    if saved:
        console.print(_savings_table(saved))
        if "note" in saved:
            console.print(saved["note"], highlight=False)
    console.print(f"The run is in {escape(str(out))}; the model is in {escape(str(out / 'model'))}.", highlight=False)


def _nothing_left(result: Mapping[str, Any]) -> str:
    """What to do about a run that no rule stopped."""
    if not result.get("units") or any(left for _, left in result["units"].values()):
        return ""
    return (
        "Nothing stopped the run before the last unit; give --keep, --max-drop, --knee or a budget such as --speedup 2."
    )


def _savings_table(savings: Mapping[str, Any]) -> Table:
    table = Table(caption=how_timed(savings), caption_justify="left")
    for heading in ("", "dense", "pruned", "pruned / dense"):
        table.add_column(heading, justify="right" if heading else "left")
    for row in savings_rows(savings):
        table.add_row(row.what, row.dense, row.pruned, row.ratio or "-")
    return table
