"""Tables 1 to 5: sizes before and after pruning, from the configurations and the number of heads removed.

Sizes do not depend on which heads are removed, so no mask and no weights are needed.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from headprune.measure.costs import megabytes
from headprune.papers.paper_models import MODELS, PAPER, PaperModel
from headprune.surgery.remove_units import remove_units
from headprune.units import resolve

Cell = str | int | float | None  # a float is shown with two decimals, None as a dash

Sizes = dict[str, int]  # module -> its parameters; the first is the whole model

SIZES = ("Parameters before", "Parameters after", "Parameters removed (%)", "MB before", "MB after")
PARTS = (
    *("Parameters before", "Share before (%)", "Parameters after", "Share after (%)", "Parameters removed (%)"),
    *("MB before", "MB after"),
)


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


def module_sizes(model: PreTrainedModel) -> Sizes:
    """Parameters of the model, its base model and the parts of that, its classifier and the parts of that."""
    sizes = {"model": _size(model), model.base_model_prefix: _size(model.base_model)}
    sizes |= {name: _size(child) for name, child in model.base_model.named_children()}
    sizes["classifier"] = _size(model.classifier)
    parts = {name: _size(child) for name, child in model.classifier.named_children()}
    # A single linear map has no modules of its own: its weight and its bias are the parts.
    parts = parts or {name: parameter.numel() for name, parameter in model.classifier.named_parameters()}
    sizes |= {f"classifier.{name}": count for name, count in parts.items()}
    return {name: count for name, count in sizes.items() if count}


def _size(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def measure(paper: PaperModel) -> tuple[Sizes, Sizes]:
    """The sizes before and after the removal of as many heads as in the paper, on the meta device."""
    model = paper.build()
    before = module_sizes(model)
    heads = [head for site in resolve(model) for unit in site.units() for head in unit]
    remove_units(model, heads[: paper.removed])
    return before, module_sizes(model)


def make_tables() -> list[Table]:
    measured = [(paper, *measure(paper)) for paper in MODELS]
    return [_summary(measured), *(_parts(number, *row) for number, row in enumerate(measured, start=2))]


def _removed(before: int, after: int) -> float:
    return 100 * (before - after) / before


def _summary(measured: Sequence[tuple[PaperModel, Sizes, Sizes]]) -> Table:
    rows: list[list[Cell]] = []
    for paper, sizes, left in measured:
        before, after = sizes["model"], left["model"]
        heads: list[Cell] = [paper.heads, paper.removed, 100 * paper.removed / paper.heads]
        parameters: list[Cell] = [before, after, _removed(before, after), megabytes(before), megabytes(after)]
        rows.append([paper.title, *heads, *paper.accuracy, paper.accuracy[1] - paper.accuracy[0], *parameters])
    accuracies = ("Published accuracy before (%)", "Published accuracy after (%)", "Change of it")
    return Table(
        1,
        "Heads removed by Greedy-Gnorm, accuracy and size.",
        f"Accuracies are as published in {PAPER}; they were not measured here. Parameters are counted on the pruned "
        "configurations; MB = 4 bytes per parameter / 2^20. ALBERT has 12 heads, each used in all 12 layers.",
        ("Model", "Heads", "Removed", "Heads removed (%)", *accuracies, *SIZES),
        rows,
    )


def _parts(number: int, paper: PaperModel, before: Sizes, after: Sizes) -> Table:
    whole, left = before["model"], after["model"]
    rows: list[list[Cell]] = [
        [
            name,
            *(count, 100 * count / whole, after[name], 100 * after[name] / left, _removed(count, after[name])),
            *(megabytes(count), megabytes(after[name])),
        ]
        for name, count in before.items()
    ]
    return Table(
        number,
        f"{paper.title}, parameters by module, dense and without {paper.removed} of {paper.heads} heads.",
        "Counted on the configuration; shares are of the whole model; MB = 4 bytes per parameter / 2^20.",
        ("Module", *PARTS),
        rows,
    )
