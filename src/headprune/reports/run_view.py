"""Views of runs for reports: records and steps, names, groups and commands."""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from headprune.checkpoint.atomic_files import path_exists
from headprune.criteria.registry import split_suffix
from headprune.defaults import COMPARED_AT
from headprune.errors import RunError
from headprune.json_forms import check_form
from headprune.measure.compare_curves import Curve
from headprune.measure.metrics import METRICS, Metric
from headprune.measure.trajectory import Step
from headprune.reports import gate_training
from headprune.reports.format import END
from headprune.run_folder import read_run, record_forms
from headprune.search.settings import command_words, migrated
from headprune.units import Head

REPAIR_TEXT = {
    "lstsq": "with least-squares repair",
    "dense": "with least squares towards the dense model",
    "mean": "with the mean moved into the bias",
    "scale": "with a scale per unit",
}
BOXES_FROM = 3  # random trials that are drawn as boxes; fewer are drawn as lines
COMPARISON = "comparison.json"  # beside the runs of a comparison: its options and results
# The settings that decide on which samples and labels a run is evaluated.
EVALUATED_ON = (
    *("data", "data_fingerprint", "split", "text_column", "pair_column", "label_column", "labels", "task"),
    *("calibration", "calibration_samples", "validation_samples", "evaluation_samples", "same_data"),
    *("seed", "max_length", "processor"),
)


@dataclass(frozen=True)
class RunView:
    """One run: its record and its steps, with a unique name among several."""

    name: str
    path: Path
    record: dict[str, Any]
    steps: list[Step]
    shown_path: str = ""  # its folder in code and commands, where it is not `path`

    @property
    def path_text(self) -> str:
        """The folder in code and commands."""
        return self.shown_path or named_path(self.path)

    @property
    def settings(self) -> dict[str, Any]:
        return self.record["settings"]

    @property
    def title(self) -> str:
        model = str(self.settings["model"])
        return Path(model).name or model

    @property
    def result(self) -> dict[str, Any] | None:
        """None for an unfinished run."""
        return self.record.get("result")

    @property
    def metric(self) -> Metric:
        """The metric; of an unfinished run that of its settings, which may be unset."""
        name = self.result["metric"] if self.result else self.settings.get("metric") or "metric"
        return METRICS.get(name, Metric(name, METRICS["accuracy"].measure))

    @property
    def is_random(self) -> bool:
        return str(self.settings.get("criterion", "")).startswith("random")

    @property
    def method(self) -> str:
        """The criterion and the repair."""
        if self.has_gates:
            return "learned gates"
        criterion = str(self.settings.get("criterion", ""))
        words = REPAIR_TEXT.get(self.settings.get("repair", "none"), "")
        return criterion + (f" {words}" if words else "")

    @property
    def schedule(self) -> str:
        """How units were chosen, step after step; empty where gates learned it."""
        return "" if self.has_gates else str(migrated(self.settings).get("schedule") or "greedy")

    @property
    def has_gates(self) -> bool:
        """Whether the removed units were learned by gates."""
        return bool(self.settings.get("gates"))

    @property
    def repaired_share(self) -> float | None:
        """The part of the squared change of site outputs on the calibration data that repairs undid: the median over
        the steps up to the result; None where nothing was repaired."""
        repairs = [repair for step in self.steps[: self.shown_first + 1] for repair in step.repairs]
        shares = [1 - repair["error"] / repair["error_without"] for repair in repairs if repair["error_without"]]
        return statistics.median(shares) if shares else None

    @property
    def stop(self) -> int | None:
        """The step whose model was saved; None for an unfinished run."""
        return self.result["step"] if self.result else None

    @property
    def chose(self) -> bool:
        """Whether a rule chose the step whose model was saved; otherwise that is the last one."""
        return self.result is not None and self.result.get("rule") != END

    @property
    def shown_first(self) -> int:
        return len(self.steps) - 1 if self.stop is None else self.stop

    @cached_property
    def heads(self) -> list[Head]:
        """The heads of the dense model: sites may have different numbers of heads, and heads that were missing from the
        start are not listed."""
        known = {head for step in self.steps for head in step.removed_heads}
        sites = None if self.steps[0].attention is None else self.steps[0].attention[0]
        tables: list[list[list[float]]] = [
            step.scores[:sites].tolist() for step in self.steps if step.scores is not None
        ]
        for table in tables:
            known |= {Head(s, h) for s, row in enumerate(table) for h, value in enumerate(row) if value == value}
        if self.result:
            tables.append(self.result["mask"][:sites])
            known |= {
                Head(s, h) for s, row in enumerate(self.result["mask"][:sites]) for h, kept in enumerate(row) if kept
            }
        if len(known) < self.steps[0].heads and tables:  # NaN scores in a run without a result
            known |= {Head(s, h) for s, row in enumerate(tables[0]) for h in range(len(row))}
        return sorted(known)

    @cached_property
    def removed_at(self) -> dict[Head, int]:
        """The step at which each head is removed."""
        return {head: step.step for step in self.steps for head in step.removed_heads}

    @property
    def widths(self) -> list[Mapping[int, int]]:
        """Neurons left at each feed-forward site, step by step; empty where only heads are pruned."""
        return [step.widths for step in self.steps]

    @property
    def has_neurons(self) -> bool:
        return bool(self.steps[0].widths)

    @property
    def samples(self) -> Hashable:
        """Equal for runs that were evaluated on the same samples."""
        settings = migrated(self.settings)
        if settings.get("data_fingerprint"):  # the same file under another name
            settings["data"] = None
        if settings["calibration"] is not None:  # then all of the data is evaluation data
            settings["calibration"], settings["calibration_samples"] = "apart", None
        return tuple(str(settings.get(name)) for name in EVALUATED_ON)

    @property
    def command(self) -> str:
        """The command that repeats this run."""
        if self.has_gates:
            return shlex.join([*gate_training.command_words(self.settings), "--out", self.path_text])
        return shlex.join([*command_words(self.settings), "--out", self.path_text])


@dataclass(frozen=True)
class Entry:
    """A row in tables and a name in legends: one run, or the runs of random that differ in their seed."""

    name: str
    runs: tuple[RunView, ...]

    @property
    def is_random(self) -> bool:
        return self.runs[0].is_random

    @property
    def boxes(self) -> bool:
        """Whether its runs are drawn together as boxes."""
        return self.is_random and len(self.runs) >= BOXES_FROM


NAMED_BY_COMPARE = re.compile(r"random-seed-?\d+(@[\w-]+)?(\+\w+)?")  # the folder of one run of random


def entries(runs: Sequence[RunView]) -> list[Entry]:
    """The runs as entries, with those of random grouped that differ only in its seed."""
    groups: dict[str, list[RunView]] = {}
    for run in runs:
        groups.setdefault(_group(run) if run.is_random else run.name, []).append(run)
    names: list[str] = []
    for group in groups.values():
        name = group[0].name
        if len(group) > 1 or NAMED_BY_COMPARE.fullmatch(name):
            criterion = _without_seed(str(group[0].settings["criterion"]))
            repair = group[0].settings.get("repair", "none")
            others = {run.settings.get("repair", "none") for run in runs}
            suffix = f"+{repair}" if len(others) > 1 and repair != "none" else ""
            suffix = (split_suffix(name)[1].partition("+")[0] if NAMED_BY_COMPARE.fullmatch(name) else "") + suffix
            if len(group) > 1:
                name = f"{criterion}{suffix} ({len(group)} runs)"
                name = name if name not in names else f"{group[0].name} and {len(group) - 1} more"
            elif group[0].is_random:
                text = f"{criterion}{suffix or (', no repair' if len(others) > 1 else '')}"
                name = text if text not in (*names, *(run.name for run in runs)) else name
        names.append(name)
    return [Entry(name, tuple(group)) for name, group in zip(names, groups.values(), strict=True)]


def _group(run: RunView) -> str:
    settings = {**migrated(run.settings), "criterion": _without_seed(str(run.settings["criterion"]))}
    return json.dumps([settings, run.metric.name], sort_keys=True, default=str)


def _without_seed(criterion: str) -> str:
    return re.sub(r"\(seed=-?\d+\)", "", criterion)


def curve_of(name: str, runs: Sequence[RunView]) -> Curve:
    """The curve of the runs of one criterion, for comparisons."""
    same = {run.samples for run in runs}
    samples = next(iter(same)) if len(same) == 1 else object()  # cannot be paired
    return Curve(
        name,
        [run.path.resolve().name for run in runs],
        runs[0].metric,
        [run.steps for run in runs],
        samples,
        runs[0].schedule,
    )


def named_path(path: Path) -> str:
    """A path that is valid for readers of a page: as it is, unless it depends on the working directory (".", "..")."""
    return str(path.resolve()) if not path.name or ".." in path.parts else str(path)


@dataclass(frozen=True)
class Compared:
    """What comparison.json says of the runs beside it."""

    names: list[str]
    trials: int
    listed: Mapping[str, str]  # the folder of a run -> its row
    options: Mapping[str, Any]  # empty in files of early versions


def compared_with(runs: Sequence[RunView]) -> Compared | None:
    """The comparison that these runs are all the runs of; None where there is none."""
    folder = runs[0].path.parent
    try:
        content = json.loads((folder / COMPARISON).read_bytes())
        check_form(content, record_forms.COMPARISON)
        rows = content if isinstance(content, list) else content["criteria"]
        listed = {name: row["name"] for row in rows for name in row["runs"]}
        about = {} if isinstance(content, list) else content["compared"]
        names = about.get("criteria") or [row["name"] for row in rows]
        trials = about.get("trials") or max(len(row["runs"]) for row in rows)
    except (OSError, ValueError, RecursionError):
        return None
    if {run.path.resolve() for run in runs} != {(folder / name).resolve() for name in listed}:
        return None
    return Compared(names, trials, listed, about)


def comparison_command(runs: Sequence[RunView]) -> str | None:
    """The command of the comparison of these runs; None where they are not all the runs of one."""
    known = compared_with(runs)
    if known is None:
        return None
    about, listed = known.options, known.listed
    shared = next((run.settings.get("repair") for run in runs if "+" not in listed[run.path.resolve().name]), "none")
    settings = {**runs[0].settings, "repair": about.get("repair") or about.get("compensate") or shared or "none"}
    if "schedule" in about:  # else all criteria had the schedule of the runs
        settings |= {"schedule": about["schedule"], "rescore": about.get("rescore", "every")}
    at = shares_compared(runs)
    return shlex.join(
        [
            *command_words(settings, "compare"),
            *("--criteria", ",".join(known.names)),
            *(["--trials", str(known.trials)] if known.trials > 1 else []),
            *(["--at", ",".join(f"{100 * share:g}" for share in at)] if at != COMPARED_AT else []),
            *("--out", named_path(runs[0].path.parent)),
        ]
    )


def shares_compared(runs: Sequence[RunView]) -> tuple[float, ...]:
    """The shares of heads removed at which these runs are compared: those of their comparison, or the usual ones."""
    known = compared_with(runs)
    return tuple((known.options if known else {}).get("at") or COMPARED_AT)


def load_runs(paths: Sequence[str | Path]) -> list[RunView]:
    """The runs at these paths; a folder of runs, as `compare` writes it, stands for all the runs in it."""
    folders: list[Path] = []
    for path in map(Path, paths):
        path_exists(path, RunError)
        inside = [] if (path / "run.json").is_file() else sorted(file.parent for file in path.glob("*/run.json"))
        folders += [folder for folder in inside or [path] if folder not in folders]
    if not folders:
        raise RunError("Name at least one run directory to report on.")
    return _with_unique_names([_load(folder) for folder in folders])


def _load(folder: Path) -> RunView:
    record, steps = read_run(folder)
    if not {"model", "data", "calibration"} <= set(record["settings"]):
        raise RunError(f"{folder / 'run.json'} names no model or data, so nothing can be reported; leave it out.")
    if not steps:
        raise RunError(f"{folder} has no step yet, so there is nothing to report; run it first.")
    ends = [entry["step"] for entry in (record.get("result"), *(record.get("points") or ())) if entry]
    if any(not 0 <= end < len(steps) for end in ends):
        raise RunError(
            f"{folder / 'steps.jsonl'} ends at step {len(steps) - 1}, and run.json names step {max(ends)}; run it "
            "again with --overwrite."
        )
    return RunView(folder.resolve().name, folder, record, steps)


def _with_unique_names(runs: list[RunView]) -> list[RunView]:
    """Every run with a unique name: as many of the last parts of its path as necessary."""
    for length in range(1, max(len(run.path.resolve().parts) for run in runs) + 1):
        names = ["/".join(run.path.resolve().parts[-length:]) for run in runs]
        if len(set(names)) == len(names):
            break
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def scores_of(run: RunView, step: int) -> list[float | None]:
    """The scores that led to a step, in the order of the run's heads; None for heads removed before."""
    table = run.steps[step].scores
    if table is None:
        return [None] * len(run.heads)
    rows = table.tolist()
    return [
        finite(rows[head.site][head.index]) if run.removed_at.get(head, step) >= step else None for head in run.heads
    ]


def ranks(scores: Sequence[float | None]) -> list[float | None]:
    """Scores as ranks from 0, the least important head, to 1; equal scores have the same rank."""
    values = sorted({value for value in scores if value is not None})
    rank = {value: index / max(1, len(values) - 1) for index, value in enumerate(values)}
    return [None if value is None else round(rank[value], 3) for value in scores]


def finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return None if value is None or not math.isfinite(value) else value
