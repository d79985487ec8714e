"""Prints the lists of criteria and published methods, without slow imports."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headprune.criteria import Criterion
from headprune.search.methods import Method


def print_criteria(criteria: Sequence[Criterion], console: Console | None = None) -> None:
    console = console or Console()
    table = Table(show_lines=True)
    names = "criterion,\nschedule"
    for heading in (names, "needs", "use", "reference"):
        table.add_column(heading, no_wrap=heading == names)
    for criterion in criteria:
        needs = ", ".join(criterion.needs) or "nothing"
        name = f"{criterion.name}\n{criterion.schedule}"
        table.add_row(name, needs, escape(criterion.use), escape(criterion.reference) or "-")
    console.print(table)
    console.print("Put inverse: before a name to invert its order; options are in brackets: hies(alpha=0.7).")


def print_methods(methods: Sequence[Method], console: Console | None = None) -> None:
    console = console or Console()
    table = Table(show_lines=True)
    for heading in ("method", "settings", "use", "reference"):
        table.add_column(heading, no_wrap=heading == "method", overflow="fold")
    for method in methods:
        parts = [method.criterion, f"repair {method.repair}", f"widths {method.widths}", f"rounds {method.rounds}"]
        table.add_row(method.name, escape("\n".join(parts)), escape(method.use), escape(method.reference))
    console.print(table)
    console.print("A method needs a budget, such as --method flap --keep-flops 0.5.", highlight=False)
