"""Prints the points of a budget: targets, measured shares, and the folders of the models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headprune.reports.budget_points import points_of
from headprune.reports.format import interval_text, value_text

SHARES = {"parameters": "parameters", "flops": "FLOPs", "latency": "time"}


def print_points(record: Mapping[str, Any], out: Path, console: Console) -> None:
    """Print the budget of a run and its models; nothing for a run without a budget."""
    points = points_of(record)
    if not record.get("points"):
        for point in points:
            if point.target_and_result:
                console.print(f"The budget: {point.target_and_result}.", highlight=False)
        return
    name, before = record["result"]["metric"], record["result"]["units"]
    kinds = [kind for kind, (count, _) in before.items() if count]
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("folder", no_wrap=True)
    for heading in (name, *kinds, *SHARES.values()):
        table.add_column(heading, justify="right", no_wrap=True)
    for point in points:
        interval = interval_text(name, point.interval)
        left = [point.shares.get(share) for share in SHARES]
        speed = f"\n{1 / point.shares['latency']:.2f}x" if point.shares.get("latency") else ""
        table.add_row(
            escape(point.folder.removeprefix("models/")),
            escape("\n".join(part for part in (value_text(name, point.metric), interval) if part)),
            *(f"{point.units.get(kind, 0):,}\nof {before[kind][0]:,}" for kind in kinds),
            *("-" if share is None else f"{share:.1%}" for share in left[:2]),
            "-" if left[2] is None else f"{left[2]:.1%}{speed}",
        )
    console.print(table)
    console.print(f"The folders are in {escape(str(out / 'models'))}.", highlight=False)
    if points[0].option == "speedup":
        texts = "; ".join(point.target_and_result for point in points if point.target_and_result)
        console.print(f"The budget: {texts}.", highlight=False)
