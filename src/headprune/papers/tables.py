"""Tables 1 to 5: sizes before and after pruning, from the configurations and the number of heads removed.

Sizes do not depend on which heads are removed, so no mask and no weights are needed.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

from headprune.measure.costs import megabytes
from headprune.measure.inspection import Inspection, inspect
from headprune.papers.paper_models import MODELS, PAPER, PaperModel
from headprune.surgery.remove_units import remove_units

Cell = str | int | float | None  # a float is shown with two decimals, None as a dash

PARTS = ("embeddings", "encoder", "pooler", "classifier")
SIZES = ("Parameters before", "Parameters after", "MB before", "MB after")


@dataclass(frozen=True)
class Table:
    """One table, written as markdown and as csv."""

    number: int
    title: str
    note: str
    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @property
    def name(self) -> str:
        return f"table{self.number}"

    def markdown(self) -> str:
        return f"**Table {self.number}.** {self.title}\n\n{self.rows_as_markdown()}\n\n{self.note}\n"

    def rows_as_markdown(self) -> str:
        lines = [
            f"| {' | '.join(self.headings)} |",
            "|" + "|".join("---" if column == 0 else "---:" for column in range(len(self.headings))) + "|",
            *(f"| {' | '.join(format_cell(cell) for cell in row)} |" for row in self.rows),
        ]
        return "\n".join(lines)

    def csv(self) -> str:
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(self.headings)
        for row in self.rows:
            writer.writerow(["" if c is None else f"{c:.2f}" if isinstance(c, float) else c for c in row])
        return stream.getvalue()


def format_cell(cell: Cell) -> str:
    """A cell as text for markdown."""
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.2f}"
    return f"{cell:,}" if isinstance(cell, int) else cell


def measure(paper: PaperModel) -> tuple[Inspection, Inspection]:
    """The inspection of the model before and after the removal of as many heads as in the paper, on the meta device."""
    model = paper.build()
    before = inspect(model)
    heads = [head for site in before.sites for unit in site.units() for head in unit]
    remove_units(model, heads[: paper.removed])
    return before, inspect(model)


def make_tables() -> list[Table]:
    measured = [(paper, *measure(paper)) for paper in MODELS]
    return [_summary(measured), *(_parts(number, *row) for number, row in enumerate(measured, start=2))]


def _sizes(before: int | None, after: int | None) -> list[Cell]:
    if before is None or after is None:
        return [None] * 4
    return [before, after, megabytes(before), megabytes(after)]


def _summary(measured: Sequence[tuple[PaperModel, Inspection, Inspection]]) -> Table:
    rows = [
        [paper.title, paper.heads, paper.removed, *paper.accuracy, *_sizes(before.parameters, after.parameters)]
        for paper, before, after in measured
    ]
    return Table(
        1,
        "Heads removed by Greedy-Gnorm, accuracy and size.",
        f"Accuracies are as published in {PAPER}; they were not measured here. Parameters are counted on the pruned "
        "configurations; MB = 4 bytes per parameter / 2^20. ALBERT has 12 heads, each used in all 12 layers.",
        ("Model", "Heads", "Removed", "Published accuracy before (%)", "Published accuracy after (%)", *SIZES),
        rows,
    )


def _parts(number: int, paper: PaperModel, before: Inspection, after: Inspection) -> Table:
    rows: list[list[Cell]] = [
        [part.capitalize(), *_sizes(before.modules.get(part), after.modules.get(part))] for part in PARTS
    ]
    rows.append(["Total", *_sizes(before.parameters, after.parameters)])
    return Table(
        number,
        f"{paper.title}, parameters by module, dense and without {paper.removed} of {paper.heads} heads.",
        "Counted on the configuration; MB = 4 bytes per parameter / 2^20. A dash: the model has no such module.",
        ("Module", *SIZES),
        rows,
    )
