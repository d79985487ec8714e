"""What exports of a run came to: time, size and outputs in each runtime, and the code that runs the model there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headprune.errors import RunError
from headprune.report.loading import ReportRun
from headprune.report.recovery import FOLDER, recovery_of
from headprune.report.use import headprune_snippet, install_line, plain_loads, quoted, transformers_snippet
from headprune.report.words import interval_text, value_text
from headprune.runtimes.spec import TOKENS
from headprune.store.files import write_text

NAME = "exports.json"  # of a run: what was exported from it, one record each
FORMAT = 1
NOTHING = "\u2013"
TITLE = "## Runtimes"  # of the section in a model card
DAMAGED = (ValueError, KeyError, TypeError, AttributeError)
Record = Mapping[str, Any]


class Cell(NamedTuple):
    """What a table shows, and under it in small what belongs to it."""

    text: str
    small: str = ""


class Use(NamedTuple):
    """One way to run a model."""

    title: str
    install: str
    snippet: str


def exports_of(place: str | Path | ReportRun, of: str | None = None) -> list[dict[str, Any]]:
    """The exports of a run, in the order in which they were made; those of one of its models only, with `of`."""
    folder = place.path if isinstance(place, ReportRun) else Path(place)
    file = folder / NAME
    if not file.is_file():
        return []
    try:
        records = json.loads(file.read_text(encoding="utf-8"))["exports"]
        rows(records)
        for record in records:
            _used(record)
    except DAMAGED:
        raise RunError(f"{file} is damaged; delete it and export the run again.") from None
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error.strerror}.") from None
    if isinstance(place, ReportRun) and place.called:
        records = [{**record, "out": Path(record["out"]).name} for record in records]
    return [record for record in records if of is None or record["of"] == of]


def forget_exports(run: Path, of: str | None = None) -> None:
    """Strike what was exported from a run, or from one of its models, before another model takes that place."""
    try:
        kept = [] if of is None else [record for record in exports_of(run) if record["of"] != of]
    except RunError:  # what cannot be read is struck as well, and is no reason to lose a model
        kept = []
    if kept:
        write_exports(run, kept)
    else:
        (run / NAME).unlink(missing_ok=True)


def write_exports(run: Path, records: Sequence[Record]) -> None:
    write_text(run / NAME, json.dumps({"format": FORMAT, "exports": list(records)}, indent=2) + "\n")


def columns(records: Sequence[Record]) -> list[str]:
    """The names above the cells of `rows`."""
    metric = _metric(records)
    measured = [f"{metric} in PyTorch", f"{metric} there", "agreement"] if metric else []
    written = ["tokens as in PyTorch"] if _writes(records) else []
    times = [f"milliseconds, {_workload_text(name)}" for name in _workloads(records)]
    return ["runtime", "MB", *times, *measured, "largest difference", *written]


def rows(records: Sequence[Record]) -> list[list[Cell]]:
    """One row for each export, in the order of `columns`."""
    return [_row(records, record) for record in records]


def how(records: Sequence[Record]) -> str:
    """What the numbers of the table are, in sentences."""
    threads = sorted({record["latency"]["threads"] for record in records})
    repeats = sorted({record["latency"]["repeats"] for record in records})
    samples = sorted({record["check"]["samples"] for record in records})
    dense = any("dense" in record["megabytes"] for record in records)
    turns = "dense \u2192 pruned, timed by turns in that runtime, dense not quantised; x: times as fast; "
    return (
        f"Each was run in its runtime on {_listed(samples)} samples and compared with PyTorch; "
        f"{turns if dense else ''}milliseconds: median of {_listed(repeats)} repetitions, CPU threads: "
        f"{_listed(threads)}; {'[low, high]: 95% interval; ' if _metric(records) else ''}difference: of an output, in "
        "units of the largest one, or of 1."
    )


def uses(run: ReportRun, records: Sequence[Record] | None = None) -> list[Use]:
    """How the model of a run is used: by transformers alone where that loads it, by headprune, by each runtime."""
    inside = f"{FOLDER}/model" if recovery_of(run) is not None else "model"
    found = []
    config = _config(run.path / inside)
    if config is not None:
        task, folder = str(run.record.get("task") or ""), f"{run.place}/{inside}"
        if plain_loads(config):
            needed = install_line(config, task, "transformers", "torch")
            found.append(Use("transformers", needed, transformers_snippet(config, task, folder)))
        needed = install_line(config, task, "headprune")
        found.append(Use("headprune", needed, headprune_snippet(config, task, folder)))
    return [*found, *map(_used, exports_of(run) if records is None else records)]


def section(run: ReportRun) -> dict[str, Any] | None:
    """The part of a page on other runtimes; None for a run that was not exported."""
    records = exports_of(run)
    if not records:
        return None
    above, below = columns(records), rows(records)
    costs = 2 + len(_workloads(records))  # what time and size take; the rest is a table of its own, to fit on paper
    tables = [
        {
            "title": title,
            "columns": [above[0], *above[part]],
            "rows": [[row[0], *row[part]] for row in below],
        }
        for title, part in (("time and size", slice(1, costs)), ("compared with PyTorch", slice(costs, None)))
    ]
    return {"name": run.name, "tables": tables, "how": how(records)}


def card_section(records: Sequence[Record]) -> str:
    """The table as a section of a model card; empty where nothing was exported."""
    if not records:
        return ""
    above = columns(records)
    lines = [
        TITLE,
        "",
        f"| {' | '.join(map(_plain, above))} |",
        f"|{'---|' * len(above)}",
        *(f"| {' | '.join(_plain(' '.join(filter(None, cell))) for cell in row)} |" for row in rows(records)),
        "",
        _plain(how(records)),
    ]
    return "\n".join(lines) + "\n"


def with_exports(card: str, records: Sequence[Record]) -> str:
    """The card with this section before the one on use, in place of an earlier one."""
    card = re.sub(rf"^{TITLE}\n.*?(?=^## |\Z)", "", card, flags=re.MULTILINE | re.DOTALL)
    section = card_section(records)
    if not section:
        return card
    use = re.search(r"^## Use\b", card, flags=re.MULTILINE)
    place = use.start() if use else len(card)
    before, after = card[:place].rstrip("\n"), card[place:]
    return "\n\n".join(filter(None, [before, section + ("\n" if after else "")])) + after


def _row(records: Sequence[Record], record: Record) -> list[Cell]:
    check, size, times = record["check"], record["megabytes"], record["latency"]
    cells = [_named(record), Cell(_arrow("{:,.2f}", size))]
    for name in _workloads(records):
        one = times.get(name)
        quick = one.get("speedup") if one else None
        cells.append(Cell(_arrow("{:,.2f}", one), f"{quick:.2f}x" if quick else "") if one else Cell(NOTHING))
    if _metric(records):
        cells += [_measured(records, check, side) for side in ("pytorch", "exported")]
        cells.append(Cell(value_text("agreement", check["agreement"], NOTHING)))
    allowed = check["tolerance"]
    cells.append(Cell(f"{check['difference']:.2g}", "quantised" if allowed is None else f"of {allowed:.2g} allowed"))
    if _writes(records):
        cells.append(Cell(NOTHING if check["tokens"] is None else f"{check['tokens']} of {TOKENS}"))
    return cells


def _named(record: Record) -> Cell:
    """The runtime and how weights are stored there; below, which of the run's models it is, unless it is the one."""
    of = {"model": "", f"{FOLDER}/model": "recovered"}.get(record["of"], record["of"].removeprefix("models/"))
    return Cell(_titled(record), of)


def _titled(record: Record) -> str:
    return str(record["title"]) + (f", {record['quantize']}" if record["quantize"] else "")


def _arrow(form: str, pair: Mapping[str, float]) -> str:
    """Dense and pruned; the pruned one alone where the dense was not looked at."""
    pruned = form.format(pair["pruned"])
    return f"{form.format(pair['dense'])} \u2192 {pruned}" if "dense" in pair else pruned


def _measured(records: Sequence[Record], check: Mapping[str, Any], side: str) -> Cell:
    found, name = check[side], check["metric"]
    if found is None:
        return Cell(NOTHING)
    text = value_text(name, found["value"], NOTHING)
    return Cell(text if _metric(records) == name else f"{name} {text}", interval_text(name, found["interval"]))


def _metric(records: Sequence[Record]) -> str:
    """The metric of all of them; "metric" where they have different ones, nothing where they have none."""
    names = {record["check"]["metric"] for record in records} - {None}
    return (names.pop() if len(names) == 1 else "metric") if names else ""


def _writes(records: Sequence[Record]) -> bool:
    return any(record["check"]["tokens"] is not None for record in records)


def _workloads(records: Sequence[Record]) -> list[str]:
    """What was timed, over all of them: batches by their size, then writing."""
    names = {name for record in records for name, value in record["latency"].items() if isinstance(value, dict)}
    return sorted(names, key=lambda name: (name.startswith("generate"), int(name.rpartition("_")[2])))


def _workload_text(name: str) -> str:
    what, _, number = name.rpartition("_")
    return f"{number} tokens written" if what == "generate" else f"batch of {number}"


def _used(record: Record) -> Use:
    """`DIR` in the code is the folder of the export."""
    folder = quoted(str(record["out"]))[1:-1]
    code = re.sub(r"\bDIR\b", lambda _: folder, record["snippet"])
    of = _named(record).small
    return Use(_titled(record) + (f" ({of})" if of else ""), f"pip install {record['install']}", code)


def _config(folder: Path) -> dict[str, Any] | None:
    """config.json of a checkpoint; None where there is none that can be read, of which the page is not about."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _listed(numbers: Sequence[Any]) -> str:
    return " or ".join(f"{number:,}" for number in numbers)


def _plain(text: str) -> str:
    """Text that markdown shows as it is, in one line."""
    return "".join(f"\\{sign}" if sign in "\\`*_[]<>|#" else sign for sign in " ".join(text.split()))
