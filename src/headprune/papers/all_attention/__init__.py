"""`headprune reproduce all-attention`: learned gates on a small All-attention Transformer (arXiv 2110.03252).

The paper trains large models on WikiText-103. Here its comparison is repeated with byte-level models that train in
minutes: loss against size, next to a Transformer of which only heads are pruned, and without each of its three
techniques.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from headprune.checkpoint.atomic_files import path_exists, write_text
from headprune.extras import require
from headprune.papers.all_attention.outcome import HEADINGS, cells_of, figure_of, sentence_of, tables_of
from headprune.papers.all_attention.plan import TITLES, Row, Settings
from headprune.papers.all_attention.study import RESULTS, Study
from headprune.papers.all_attention.text import read_text
from headprune.papers.all_attention.training import OnLoss
from headprune.papers.paper_models import ReproductionError
from headprune.papers.tables import Table, format_cell
from headprune.reports.save_figures import save_figure

with require("cli", "Reproducing a paper needs"):
    from rich import box
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column
    from rich.table import Table as RichTable

DEFAULTS = Settings()
# Short headings for a terminal -> columns of the tables.
TERMINAL_COLUMNS = {
    "heads": "Heads",
    "size": "Parameters outside embeddings",
    "%": "of dense (%)",
    "loss": "Loss",
    "% to dense": "Against dense (%)",
    "% to trained on": "Against dense trained on (%)",
}


def reproduce_all_attention(
    out: Path,
    *,
    data: str | Path | None = None,
    scale: float = 1.0,
    seed: int = 0,
    console: Console | None = None,
) -> tuple[list[Path], list[dict[str, Any]]]:
    """Train, prune and measure all models of the comparison, and write its tables and its figure to `out`; returns the
    files and the rows.

    `data` is a text file, by default the help texts of Python. `scale` multiplies the numbers of steps. Finished rows
    in `out` are not repeated.
    """
    console = console or Console()
    if path_exists(out, ReproductionError) and not out.is_dir():
        raise ReproductionError(f"{out} is a file; choose a directory for the tables and figures.")
    settings = dataclasses.replace(DEFAULTS, seed=seed).scaled(scale)
    text = read_text(data, settings.context)
    study = Study(out, settings, text)
    try:
        out.mkdir(parents=True, exist_ok=True)
        _run(study, console)
        tables = tables_of(study.rows, settings, text.name)
        files = [out / RESULTS, *_write_tables(tables, out)]
        files += save_figure(figure_of(study.rows, text.name), out / "figures", "figure1")
    except OSError as error:
        raise ReproductionError(f"Cannot write to {out}: {error.strerror}; choose another directory.") from None
    console.print(_terminal_table(study.rows))
    console.print(
        "Size: parameters outside embeddings. Loss: nats per byte of held-out text, and how far it is above that of "
        "the dense model, as it was and trained on for as many steps; the tables have intervals.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(sentence_of(study.rows, settings), highlight=False, soft_wrap=True)
    console.print(f"{len(files)} files are in {out}, and the models in {out / 'models'}.", highlight=False)
    return files, study.rows


def _run(study: Study, console: Console) -> None:
    missing = study.missing()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("loss {task.fields[loss]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(map(study.steps, missing)), loss="-")

        def begin(row: Row) -> OnLoss:
            progress.update(task, description=f"{TITLES[row.model]}: {row.what}")
            return lambda loss: progress.update(task, advance=1, loss=f"{loss:.3f}")

        def finished(row: dict[str, Any]) -> None:
            progress.console.print(
                f"{len(study.rows)} of {len(study.plan)}, {TITLES[row['model']]}, {row['what']}: loss "
                f"{row['loss']:.4f}, {row['heads']} heads, {row['parameters']:,} parameters outside embeddings",
                highlight=False,
                soft_wrap=True,
            )

        study.run(begin, finished)


def _write_tables(tables: list[Table], out: Path) -> list[Path]:
    files = []
    for table in tables:
        for suffix, content in (("md", table.markdown()), ("csv", table.csv())):
            files.append(out / f"{table.name}.{suffix}")
            write_text(files[-1], content)
    return files


def _terminal_table(rows: list[dict[str, Any]]) -> RichTable:
    """All rows as a table that fits into a terminal; the files have more columns."""
    columns = [Column(name, justify="right") for name in TERMINAL_COLUMNS]
    table = RichTable(Column(no_wrap=True), *columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for model, title in TITLES.items():
        table.add_section()
        table.add_row(title, style="bold")
        for row in rows:
            if row["model"] == model:
                cells = dict(zip(HEADINGS, cells_of(row, rows), strict=True))
                table.add_row(row["what"], *(format_cell(cells[heading]) for heading in TERMINAL_COLUMNS.values()))
    return table
