"""Prints a comparison of criteria."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headprune.cli.table_style import LEAN
from headprune.measure.compare_curves import Comparison
from headprune.measure.metrics import SHARES_OF_ONE
from headprune.reports.format import (
    interval_text,
    spread_text,
    value_text,
    verdict,
)

WIDTH = 15  # columns of a console that a point takes
NAMES, AROUND = 12, 34  # that the names take, and all but the points


def print_comparison(out: Path, rows: Sequence[Comparison], console: Console | None = None) -> None:
    """Print the table, best first, and which differences are significant."""
    console = console or Console()
    name, until = rows[0].measured.name, rows[0].usable_until
    unit = " in percent" if name in SHARES_OF_ONE else ""
    legend = f"{name}{unit} / agreement with the dense model · [low, high]: 95% interval"
    legend += f" · area: of -log {name}" if rows[0].measured.logarithmic else ""
    legend += " · low..high: over the runs" if any(len(row.runs) > 1 for row in rows) else ""
    table = Table(
        title="Best first",
        title_justify="left",
        caption=escape(legend),
        caption_justify="left",
        **LEAN,
    )
    # As many points as fit into a line; the others have tables of their own.
    points = list(rows[0].metric)
    first, per_table = max(1, (console.width - AROUND) // WIDTH), max(1, (console.width - NAMES) // WIDTH)
    table.add_column("criterion", overflow="fold", min_width=9)
    table.add_column(f"area to\n{until:.0%} (all)" if until else "area", justify="right", no_wrap=True)
    for share in points[:first]:
        table.add_column(f"{share} gone", justify="right", no_wrap=True)
    table.add_column("heads\nwithin\n" + " / ".join(rows[0].removable), justify="right", no_wrap=True)
    for row in rows:
        runs = f" ({len(row.runs)} runs)" if len(row.runs) > 1 else ""
        areas = [f"{row.usable_area:.4f}", f"({row.area:.4f})" if until else ""]
        if row.spread_area is not None:
            areas.append(f"{row.spread_area.low:.2f}..{row.spread_area.high:.2f}")
        table.add_row(
            escape("\n".join(filter(None, (row.name + runs, row.schedule)))),
            "\n".join(filter(None, areas)).replace("nan", "-"),
            *(_comparison_cell(row, share) for share in points[:first]),
            " / ".join(map(str, row.removable.values())),
        )
    console.print(table)
    for start in range(first, len(points), per_table):
        more = Table(**LEAN)
        more.add_column("criterion", overflow="fold", min_width=9)
        shown = points[start : start + per_table]
        for share in shown:
            more.add_column(f"{share} gone", justify="right", no_wrap=True)
        for row in rows:
            more.add_row(escape(row.name), *(_comparison_cell(row, share) for share in shown))
        console.print(more)
    console.print()
    for sentence in verdict(rows):
        console.print(sentence, highlight=False, markup=False)
    console.print(f"The runs are in {escape(str(out))}.", highlight=False)


def _comparison_cell(row: Comparison, share: str) -> str:
    """The metric and the agreement, below them the interval, and the spread of several runs."""
    name = row.measured.name

    def short(kind: str, value: float | None) -> str:
        text = value_text(kind, value)
        return f"{100 * value:.1f}" if text.endswith("%") and value is not None else text

    lines = [
        f"{short(name, row.metric[share])} / {short('agreement', row.agreement[share])}",
        interval_text(name, row.interval[share]),
        spread_text(name, row.spread[share]),
    ]
    return escape("\n".join(line for line in lines if line))
