"""The exports of a run: time, size and check in each runtime, and code that runs the model there."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headprune.display import counted
from headprune.exports.runtime import TOKENS
from headprune.json_forms import check_form
from headprune.reports.format import interval_text, value_text
from headprune.reports.recovery import recovery_of
from headprune.reports.run_view import RunView
from headprune.run_folder.exports import damaged, read_exports
from headprune.run_folder.record_forms import EXPORT
from headprune.run_folder.recovery import FOLDER
from headprune.snippets.checkpoints import (
    headprune_snippet,
    install_line,
    plain_loads,
    quoted,
    read_config,
    transformers_snippet,
)

NO_VALUE = "\u2013"
DAMAGED = (ValueError, KeyError, TypeError, AttributeError)
Record = Mapping[str, Any]


class Cell(NamedTuple):
    """A cell of a table: its text, and a small line below."""

    text: str
    small: str = ""


class Use(NamedTuple):
    """Code to run a model: in transformers, headprune or a runtime."""

    title: str
    install: str
    snippet: str


def exports_of(source: str | Path | RunView, of: str | None = None) -> list[dict[str, Any]]:
    """The exports of a run; with `of` only those of one of its models."""
    folder = source.path if isinstance(source, RunView) else Path(source)
    records = read_exports(folder)
    try:
        check_form(records, [EXPORT])
        _ = rows(records), columns(records), how(records)
        for record in records:
            _use(record)
    except DAMAGED:
        raise damaged(folder) from None
    if isinstance(source, RunView) and source.shown_path:
        records = [{**record, "out": Path(record["out"]).name} for record in records]
    return [record for record in records if of is None or record["of"] == of]


def columns(records: Sequence[Record]) -> list[str]:
    """The names above the cells of `rows`."""
    metric = _metric(records)
    measured = [f"{metric} in PyTorch", f"{metric} exported", "agreement"] if metric else []
    tokens = ["tokens equal to PyTorch"] if _generates_text(records) else []
    times = [f"milliseconds, {_workload_text(name)}" for name in _workloads(records)]
    return ["runtime", "MB", *times, *measured, "largest difference", *tokens]


def rows(records: Sequence[Record]) -> list[list[Cell]]:
    """One row for each export, in the order of `columns`."""
    return [_row(records, record) for record in records]


def how(records: Sequence[Record]) -> str:
    """An explanation of the numbers in the table."""
    threads = sorted({record["latency"]["threads"] for record in records})
    repeats = sorted({record["latency"]["repeats"] for record in records})
    samples = sorted({record["check"]["samples"] for record in records})
    dense = any("dense" in record["megabytes"] for record in records)
    turns = "dense \u2192 pruned, timed in turns in that runtime, dense not quantised; x: times as fast; "
    return (
        f"Each was run in its runtime on {_join_numbers(samples)} samples and compared with PyTorch; "
        f"{turns if dense else ''}milliseconds: median of {_join_numbers(repeats)} repetitions, CPU threads: "
        f"{_join_numbers(threads)}; {'[low, high]: 95% interval; ' if _metric(records) else ''}largest "
        "difference: of any output, relative to the largest output or to 1."
    )


def uses(run: RunView, records: Sequence[Record] | None = None) -> list[Use]:
    """Code to use the model of a run: in plain transformers where that loads it, in headprune, and in each runtime."""
    inside = f"{FOLDER}/model" if recovery_of(run) is not None else "model"
    result = []
    config = read_config(run.path / inside)
    if config is not None:
        task, folder = str(run.record.get("task") or ""), f"{run.path_text}/{inside}"
        if plain_loads(config):
            install = install_line(config, task, "transformers", "torch")
            result.append(Use("transformers", install, transformers_snippet(config, task, folder)))
        install = install_line(config, task, "headprune")
        result.append(Use("headprune", install, headprune_snippet(config, task, folder)))
    return [*result, *map(_use, exports_of(run) if records is None else records)]


def section(run: RunView) -> dict[str, Any] | None:
    """The section of a page about other runtimes; None for a run without exports."""
    records = exports_of(run)
    if not records:
        return None
    headings, cells = columns(records), rows(records)
    costs = 2 + len(_workloads(records))  # columns of time and size; the rest is a second table, to fit on paper
    tables = [
        {
            "title": title,
            "columns": [headings[0], *headings[part]],
            "rows": [[row[0], *row[part]] for row in cells],
        }
        for title, part in (("time and size", slice(1, costs)), ("compared with PyTorch", slice(costs, None)))
    ]
    return {"name": run.name, "tables": tables, "how": how(records)}


def _row(records: Sequence[Record], record: Record) -> list[Cell]:
    check, size, times = record["check"], record["megabytes"], record["latency"]
    cells = [_name_cell(record), Cell(_arrow("{:,.2f}", size))]
    for name in _workloads(records):
        time = times.get(name)
        speedup = time.get("speedup") if time else None
        cells.append(Cell(_arrow("{:,.2f}", time), f"{speedup:.2f}x" if speedup else "") if time else Cell(NO_VALUE))
    if _metric(records):
        cells += [_measured(records, check, side) for side in ("pytorch", "exported")]
        cells.append(Cell(value_text("agreement", check["agreement"], NO_VALUE)))
    allowed = check["tolerance"]
    cells.append(Cell(f"{check['difference']:.2g}", "quantised" if allowed is None else f"of {allowed:.2g} allowed"))
    if _generates_text(records):
        cells.append(Cell(NO_VALUE if check["tokens"] is None else f"{check['tokens']} of {TOKENS}"))
    return cells


def _name_cell(record: Record) -> Cell:
    """The runtime and its quantisation; below, the model, unless it is the result of the run."""
    of = {"model": "", f"{FOLDER}/model": "recovered"}.get(record["of"], record["of"].removeprefix("models/"))
    return Cell(_title(record), of)


def _title(record: Record) -> str:
    return str(record["title"]) + (f", {record['quantize']}" if record["quantize"] else "")


def _arrow(form: str, pair: Mapping[str, float]) -> str:
    """Dense and pruned; only pruned where dense was not measured."""
    pruned = form.format(pair["pruned"])
    return f"{form.format(pair['dense'])} \u2192 {pruned}" if "dense" in pair else pruned


def _measured(records: Sequence[Record], check: Mapping[str, Any], side: str) -> Cell:
    value, name = check[side], check["metric"]
    if value is None:
        return Cell(NO_VALUE)
    text = value_text(name, value["value"], NO_VALUE)
    return Cell(text if _metric(records) == name else f"{name} {text}", interval_text(name, value["interval"]))


def _metric(records: Sequence[Record]) -> str:
    """The metric of all exports; "metric" where they differ, empty where there is none."""
    names = {record["check"]["metric"] for record in records} - {None}
    return (names.pop() if len(names) == 1 else "metric") if names else ""


def _generates_text(records: Sequence[Record]) -> bool:
    return any(record["check"]["tokens"] is not None for record in records)


def _workloads(records: Sequence[Record]) -> list[str]:
    """The workloads that were timed: batches by size, then generation."""
    names = {name for record in records for name, value in record["latency"].items() if isinstance(value, dict)}
    return sorted(names, key=lambda name: (name.startswith("generate"), int(name.rpartition("_")[2])))


def _workload_text(name: str) -> str:
    what, _, number = name.rpartition("_")
    return f"{counted(int(number), 'token')} generated" if what == "generate" else f"batch of {number}"


def _use(record: Record) -> Use:
    """The code with the folder of the export in place of `DIR`."""
    folder = quoted(str(record["out"]))[1:-1]
    code = re.sub(r"\bDIR\b", lambda _: folder, record["snippet"])
    of = _name_cell(record).small
    return Use(_title(record) + (f" ({of})" if of else ""), f"pip install {record['install']}", code)


def _join_numbers(numbers: Sequence[Any]) -> str:
    return " or ".join(f"{number:,}" for number in numbers)
