"""Runs as a report needs them."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from headprune.errors import RunError
from headprune.measure.metrics import METRICS, Metric
from headprune.measure.trajectory import Step
from headprune.search.config import command_words
from headprune.store.rundir import read_run
from headprune.units import Head

COMPENSATIONS = {"lstsq": "with least-squares compensation", "mean": "with the mean moved into the bias"}
BOXES_FROM = 3  # random trials are drawn together as boxes, fewer of them as lines


@dataclass(frozen=True)
class ReportRun:
    """One run: its record and its steps, named so that several can stand side by side."""

    name: str
    path: Path
    record: dict[str, Any]
    steps: list[Step]

    @property
    def settings(self) -> dict[str, Any]:
        return self.record["settings"]

    @property
    def title(self) -> str:
        model = str(self.settings["model"])
        return Path(model).name or model

    @property
    def result(self) -> dict[str, Any] | None:
        """None for a run that has not come to its end."""
        return self.record.get("result")

    @property
    def metric(self) -> Metric:
        """A run that has not come to its end may not know which metric its task led to."""
        name = self.result["metric"] if self.result else self.settings.get("metric") or "metric"
        return METRICS.get(name, Metric(name, METRICS["accuracy"].measure))

    @property
    def is_random(self) -> bool:
        return str(self.settings.get("criterion", "")).startswith("random")

    @property
    def method(self) -> str:
        """The criterion, and what made up for the heads that went."""
        criterion = str(self.settings.get("criterion", ""))
        words = COMPENSATIONS.get(self.settings.get("compensate", "none"), "")
        return criterion + (f" {words}" if words else "")

    @property
    def made_up(self) -> float | None:
        """The part of the change of site outputs on the calibration data, squared, that compensation made up for: the
        median over the steps up to the result; None where nothing was compensated."""
        repairs = [repair for step in self.steps[: self.shown_first + 1] for repair in step.compensation]
        shares = [1 - repair["error"] / repair["error_without"] for repair in repairs if repair["error_without"]]
        return statistics.median(shares) if shares else None

    @property
    def stop(self) -> int | None:
        """The step whose model was saved; None for a run that has not come to its end."""
        return self.result["step"] if self.result else None

    @property
    def shown_first(self) -> int:
        return len(self.steps) - 1 if self.stop is None else self.stop

    @cached_property
    def heads(self) -> list[Head]:
        """The heads of the dense model, as far as the run knows them: sites may have different numbers of heads, and
        where heads were missing from the start, they are not listed."""
        known = {head for step in self.steps for head in step.removed}
        tables: list[list[list[float]]] = [step.scores.tolist() for step in self.steps if step.scores is not None]
        for table in tables:
            known |= {Head(s, h) for s, row in enumerate(table) for h, value in enumerate(row) if value == value}
        if self.result:
            tables.append(self.result["mask"])
            known |= {Head(s, h) for s, row in enumerate(self.result["mask"]) for h, kept in enumerate(row) if kept}
        if len(known) < self.steps[0].heads and tables:  # scores that are not numbers, in a run without a result
            known |= {Head(s, h) for s, row in enumerate(tables[0]) for h in range(len(row))}
        return sorted(known)

    @cached_property
    def gone_at(self) -> dict[Head, int]:
        """The step at which each head goes."""
        return {head: step.step for step in self.steps for head in step.removed}

    @property
    def command(self) -> str:
        """The command that repeats this run."""
        return shlex.join([*command_words(self.settings), "--out", str(self.path)])


def load_runs(paths: Sequence[str | Path]) -> list[ReportRun]:
    """The runs at these places; a folder of runs, as `compare` writes it, counts as all the runs in it."""
    folders: list[Path] = []
    for path in map(Path, paths):
        inside = [] if (path / "run.json").is_file() else sorted(file.parent for file in path.glob("*/run.json"))
        folders += [folder for folder in inside or [path] if folder not in folders]
    if not folders:
        raise RunError("Name at least one run directory to report on.")
    return _named([_load(folder) for folder in folders])


def _load(folder: Path) -> ReportRun:
    try:
        record, steps = read_run(folder)
        known = isinstance(record["settings"], dict) and "model" in record["settings"]
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise RunError(f"{folder / 'run.json'} is damaged; run it again with --overwrite.")
    if not steps:
        raise RunError(f"{folder} has no step yet, so there is nothing to report; run it first.")
    return ReportRun(folder.resolve().name, folder, record, steps)


def _named(runs: list[ReportRun]) -> list[ReportRun]:
    """Every run with a name of its own: as many of the last parts of its path as that takes."""
    for length in range(1, max(len(run.path.resolve().parts) for run in runs) + 1):
        names = ["/".join(run.path.resolve().parts[-length:]) for run in runs]
        if len(set(names)) == len(names):
            break
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def split_random(runs: Sequence[ReportRun]) -> tuple[list[ReportRun], list[ReportRun]]:
    """The runs that are drawn as lines, and the random trials that are drawn as boxes."""
    trials = [run for run in runs if run.is_random]
    if len(trials) < BOXES_FROM:
        return list(runs), []
    return [run for run in runs if not run.is_random], trials


def scores_of(run: ReportRun, step: int) -> list[float | None]:
    """The scores that led to a step, in the order of the run's heads; None where a head had gone before."""
    table = run.steps[step].scores
    if table is None:
        return [None] * len(run.heads)
    rows = table.tolist()
    return [finite(rows[head.site][head.index]) if run.gone_at.get(head, step) >= step else None for head in run.heads]


def ranks(scores: Sequence[float | None]) -> list[float | None]:
    """Scores as places from 0, the least important head, to 1; equal scores share a place."""
    values = sorted({value for value in scores if value is not None})
    place = {value: index / max(1, len(values) - 1) for index, value in enumerate(values)}
    return [None if value is None else round(place[value], 3) for value in scores]


def finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return None if value is None or not math.isfinite(value) else value
