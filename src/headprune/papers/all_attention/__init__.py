"""`headprune reproduce all-attention`: learned gates on a small All-attention Transformer (arXiv 2110.03252).

The paper trains large models on WikiText-103. Here its comparison is repeated with byte-level models that train in
minutes: loss against size, next to a Transformer of which only heads are pruned, without each of its three techniques,
and against criteria that remove as many heads.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headprune.checkpoint.atomic_files import path_exists, write_text
from headprune.extras import require
from headprune.papers.all_attention.outcome import HEADINGS, cells_of, figure_of, sentence_of, tables_of
from headprune.papers.all_attention.plan import PAPER, TITLES, Row, Settings
from headprune.papers.all_attention.sizes import paper_sizes
from headprune.papers.all_attention.speed import TURNS
from headprune.papers.all_attention.study import Study, made_by
from headprune.papers.all_attention.summary import check_seeds, summarise
from headprune.papers.all_attention.text import DEFAULT, read_text
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
RESULTS = "results.json"
TIMED = ("dense", "target")  # kinds of rows whose speed is measured
# Short headings for a terminal -> columns of the first table.
TERMINAL_COLUMNS = {
    "heads": "heads",
    "size": "parameters outside embeddings",
    "%": "of dense (%)",
    "loss": "loss",
    "% to dense": "against dense (%)",
    "% to trained on": "against dense, trained on (%)",
}


def reproduce_all_attention(
    out: Path,
    *,
    data: str | Path | None = None,
    scale: float = 1.0,
    seeds: Sequence[int] = (0,),
    console: Console | None = None,
) -> tuple[list[Path], list[dict[str, Any]]]:
    """Train, prune and measure all models of the comparison, and write its tables and its figure to `out`; returns the
    files and the rows, over all seeds.

    `data` is a text file, by default the help texts of Python. `scale` multiplies the numbers of steps. Finished rows
    in `out` are not repeated.
    """
    console = console or Console()
    if path_exists(out, ReproductionError) and not out.is_dir():
        raise ReproductionError(f"{out} is a file; choose a directory for the tables and figures.")
    check_seeds(seeds)
    settings = {seed: dataclasses.replace(DEFAULTS, seed=seed).scaled(scale) for seed in seeds}
    text = read_text(data, DEFAULTS.context)
    studies = {seed: Study(out / f"seed-{seed}", of_seed, text) for seed, of_seed in settings.items()}
    try:
        for seed, study in studies.items():
            study.out.mkdir(parents=True, exist_ok=True)
            _run(study, console, f"seed {seed}, " if len(seeds) > 1 else "")
        results = _results(studies)
        write_text(out / RESULTS, json.dumps(results, indent=1) + "\n")
        files = [out / RESULTS, *_write_tables(tables_of(results), out)]
        files += save_figure(figure_of(results), out / "figures", "figure1")
    except OSError as error:
        raise ReproductionError(f"Cannot write to {out}: {error.strerror}; choose another directory.") from None
    console.print(_terminal_table(results["rows"]))
    console.print(
        "Size: parameters outside embeddings. Loss: nats per byte of held-out text, and how far it is above that of "
        "the dense model, as it was and trained on for as many steps, in per cent; over several seeds, means with "
        "standard deviations.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(sentence_of(results), highlight=False, soft_wrap=True)
    console.print(f"{len(files)} files are in {out}, and the models of each seed in its folder.", highlight=False)
    return files, results["rows"]


def _results(studies: Mapping[int, Study]) -> dict[str, Any]:
    """What results.json holds."""
    study = next(iter(studies.values()))
    settings = study.settings.to_json()
    settings.pop("seed")
    seeds = ",".join(map(str, studies))
    data = "" if study.text.name == DEFAULT else f" --data {study.text.name}"
    speeds = {seed: study.speeds(TIMED) for seed, study in studies.items()}
    return {
        "paper": PAPER,
        "command": f"headprune reproduce all-attention{data} --seeds {seeds} --scale {settings['scale']:g} --out DIR",
        "settings": settings,
        "seeds": list(studies),
        "text": study.text.to_json(),
        "made_by": made_by(),
        "threads": torch.get_num_threads(),
        "turns": TURNS,
        "sizes": paper_sizes(),
        "rows": summarise({seed: study.rows for seed, study in studies.items()}, speeds),
    }


def _run(study: Study, console: Console, prefix: str) -> None:
    missing = study.missing()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("loss {task.fields[loss]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(map(study.steps, missing)), loss="-")

        def begin(row: Row) -> OnLoss:
            progress.update(task, description=f"{prefix}{TITLES[row.model]}: {row.what}")
            return lambda loss: progress.update(task, advance=1, loss=f"{loss:.3f}")

        def finished(row: dict[str, Any]) -> None:
            progress.console.print(
                f"{prefix}{len(study.rows)} of {len(study.plan)}, {TITLES[row['model']]}, {row['what']}: loss "
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


def _terminal_table(rows: Sequence[Mapping[str, Any]]) -> RichTable:
    """All rows as a table that fits into a terminal; the files have more columns."""
    columns = [Column(name, justify="right") for name in TERMINAL_COLUMNS]
    table = RichTable(Column(no_wrap=True), *columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for model, title in TITLES.items():
        table.add_section()
        table.add_row(title, style="bold")
        for row in rows:
            if row["model"] == model:
                cells = dict(zip(HEADINGS, cells_of(row), strict=True))
                table.add_row(row["what"], *(format_cell(cells[heading]) for heading in TERMINAL_COLUMNS.values()))
    return table
