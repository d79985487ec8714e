"""Prints the table of times of layers."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headprune.cli.table_style import LEAN
from headprune.display import counted
from headprune.measure.latency import Curve, LatencyTable

MAX_ROWS = 9  # of a curve; all counts are in the JSON


def print_latency(table: LatencyTable, console: Console | None = None) -> None:
    """Print a block of rows per kind of site: units left, the time of one such site, and the share of the pass."""
    console = console or Console()
    rows = Table(
        title=f"Time of a pass of {table.batch_size} x {table.length}: {1000 * table.dense:.2f} ms",
        title_justify="left",
        caption="left: units of a site · ms: added to a pass by them · of the pass: all such sites / the dense pass",
        caption_justify="left",
        **LEAN,
    )
    for heading in ("site", "left", "ms", "of the pass"):
        rows.add_column(heading, justify="left" if heading == "site" else "right")
    for curve in table.curves:
        for number, index in enumerate(_shown_indices(curve)):
            seconds = curve.seconds[index]
            name = f"{curve.place} x {len(curve.sites)}" if not number else ""
            share = seconds * len(curve.sites) / table.dense
            rows.add_row(name, f"{curve.counts[index]:,}", f"{1000 * seconds:.3f}", f"{share:.1%}")
        rows.add_section()
    rows.add_row("everything else", "", f"{1000 * table.rest:.3f}", f"{table.rest / table.dense:.1%}")
    console.print(rows)
    method = (
        f"Shortest of {table.repeats} or more turns, {table.dtype} on {table.device}, "
        f"{counted(table.threads, 'thread')}, {table.processor}."
    )
    console.print(escape(method), highlight=False)
    if table.unmeasured:
        console.print(f"Not reached by such a pass: {counted(len(table.unmeasured), 'site')}.", highlight=False)


def _shown_indices(curve: Curve) -> list[int]:
    """Indices of the shown counts, from the most to the fewest."""
    last = len(curve.counts) - 1
    steps = min(MAX_ROWS - 1, last)
    return sorted({round(last * step / steps) for step in range(steps + 1)}, reverse=True) if steps else [0]
