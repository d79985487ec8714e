"""The table of times, as a terminal shows it."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headprune.cli.tables import LEAN
from headprune.measure.latency import Curve, LatencyTable

SHOWN = 9  # counts of a curve; all of them are in the JSON


def print_latency(table: LatencyTable, console: Console | None = None) -> None:
    """A block of rows per kind of site: units that are left, what one such site takes, and that of a whole pass."""
    console = console or Console()
    rows = Table(
        title=f"Time of a pass of {table.batch_size} x {table.length}: {1000 * table.dense:.2f} ms",
        title_justify="left",
        caption="left: units of a site · ms: that they add to a pass · of the pass: all such sites, by the dense pass",
        caption_justify="left",
        **LEAN,
    )
    for heading in ("site", "left", "ms", "of the pass"):
        rows.add_column(heading, justify="left" if heading == "site" else "right")
    for curve in table.curves:
        for number, place in enumerate(_shown(curve)):
            taken = curve.seconds[place]
            name = f"{curve.place} x {len(curve.sites)}" if not number else ""
            share = taken * len(curve.sites) / table.dense
            rows.add_row(name, f"{curve.counts[place]:,}", f"{1000 * taken:.3f}", f"{share:.1%}")
        rows.add_section()
    rows.add_row("everything else", "", f"{1000 * table.rest:.3f}", f"{table.rest / table.dense:.1%}")
    console.print(rows)
    threads = "1 thread" if table.threads == 1 else f"{table.threads} threads"
    how = f"Shortest of {table.repeats} or more turns, {table.dtype} on {table.device}, {threads}, {table.processor}."
    console.print(escape(how), highlight=False)
    if table.unmeasured:
        console.print(f"{len(table.unmeasured)} sites are not reached by such a pass.", highlight=False)


def _shown(curve: Curve) -> list[int]:
    """Places of counts from the most to the fewest, both ends among them."""
    last = len(curve.counts) - 1
    steps = min(SHOWN - 1, last)
    return sorted({round(last * step / steps) for step in range(steps + 1)}, reverse=True) if steps else [0]
