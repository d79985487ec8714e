"""The table of methods, for the terminal; needs nothing of what takes long to import."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headprune.search.methods import Method


def print_methods(methods: Sequence[Method], console: Console | None = None) -> None:
    console = console or Console()
    table = Table(show_lines=True)
    for heading in ("method", "made of", "use", "reference"):
        table.add_column(heading, no_wrap=heading == "method", overflow="fold")
    for one in methods:
        parts = [one.criterion, f"repair {one.repair}", f"widths {one.widths}", f"rounds {one.rounds}"]
        table.add_row(one.name, escape("\n".join(parts)), escape(one.use), escape(one.reference))
    console.print(table)
    console.print("A method goes with a budget, such as --method flap --keep-flops 0.5.", highlight=False)
