"""Progress on stderr: a bar, the curve of a run so far, or a table of all runs of a study."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from headprune import distributed
from headprune.cli.table_style import LEAN
from headprune.measure.compare_at_budget import share_left
from headprune.reports.format import left_text
from headprune.search.observers import Observer, Observers

if TYPE_CHECKING:
    from headprune.measure.trajectory import Step
    from headprune.runs.studies.study_runs import Job
    from headprune.search.layerwise.prune_layer import PrunedLayer

LINE_SECONDS = 10  # seconds between two lines without a terminal
WIDTH, HEIGHT = 64, 10
LEFT = {
    "parameters": "of the parameters",
    "memory": "of the memory",
    "flops": "of the FLOPs",
    "latency": "of the time",
}
EIGHTHS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
# The states of a run, in the order of the table, which may be too small for all runs.
STATES = ("runs", "runs again", "failed", "waits", "done")
STYLES = {"runs": "cyan", "runs again": "yellow", "failed": "red", "done": "green"}


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, as stdout is for results."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(escape(description), total=total)
        yield lambda count: progress.advance(task, count)


class Display:
    """Updates a display in place on a terminal (`live`); elsewhere prints a line from time to time."""

    def __init__(self, console: Console, live: Live | None) -> None:
        self.console, self.live = console, live
        self.printed = time.monotonic()

    def show(self, render: Callable[[], RenderableType], line: Callable[[], str], *, at_once: bool = False) -> None:
        if self.live is not None:
            self.live.update(render())
        elif at_once or time.monotonic() - self.printed > LINE_SECONDS:
            self.printed = time.monotonic()
            self.console.print(line(), highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _display() -> Iterator[Display]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Display(console, None)
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield Display(console, live)


@contextmanager
def live_curve(title: str, measure: str | None = None) -> Iterator[LiveCurve]:
    with _display() as display:
        yield LiveCurve(title, display, measure)


@contextmanager
def with_logger(observer: Observer, report_to: str | None, out: Path) -> Iterator[Observer]:
    """The observer, with `report_to` together with a logger of steps."""
    if report_to is None or not distributed.is_main():
        yield observer
        return

    from headprune.search.step_logger import StepLogger

    with StepLogger(report_to, out / "logs", name=out.name) as logger:
        yield Observers(observer, logger)


@contextmanager
def progress_table() -> Iterator[ProgressTable]:
    with _display() as display:
        yield ProgressTable(display)


class LiveCurve(Observer):
    """Draws the metric over the heads removed, and a status line; over the FLOPs removed where neurons are removed as
    well. `measure` is that of the budget."""

    def __init__(self, title: str, display: Display, measure: str | None = None) -> None:
        self.title, self.display, self.measure = title, display, measure
        self.steps: list[Step] = []
        self.logged: dict[str, Any] = {}  # the last values of a training
        self.started = time.monotonic()

    def run(self, name: str, job: Any = None, *, again: bool = False) -> Observer:
        self.title = name
        self.steps = []
        return self

    def step(self, step: Step, seconds: Mapping[str, float]) -> None:
        self.replayed(step)

    def replayed(self, step: Step) -> None:
        self.steps.append(step)
        self.display.show(
            lambda: Group(*self.curve(), self.status()), lambda: self.status().plain, at_once=step.left == 0
        )

    def layer(self, done: int, layers: int, pruned: PrunedLayer) -> None:
        units = len(pruned.removed)
        seconds = time.monotonic() - self.started
        self._line(
            f"{self.title}: layer {done} of {layers} done ({units} units removed at {pruned.layer}), {seconds:.0f} s"
        )

    def log(self, entry: Mapping[str, Any]) -> None:
        """Show one line about a training: the step, the loss, the last value of the metric."""
        if entry["step"] < self.logged.get("step", 0):  # the next training
            self.logged = {}
        if not {"loss", "eval_metric"} & set(entry):
            return
        if "eval_metric" in entry:
            self.logged["evaluated_step"] = entry["step"]
        self.logged |= entry
        self._line(training_line(self.logged))

    def _line(self, text: str) -> None:
        self.display.show(lambda: Text(text), lambda: text)

    def status(self) -> Text:
        first, last = self.steps[0], self.steps[-1]
        agree = "" if last.agreement is None else f", agreement {last.agreement:.3f}"
        interval = last.interval
        finite_interval = interval is not None and math.isfinite(interval.high - interval.low)
        margin = f" ± {(interval.high - interval.low) / 2:.2g}" if interval is not None and finite_interval else ""
        seconds = time.monotonic() - self.started
        return Text(
            f"{self.title}: {self.removed()}{self.left()}, "
            f"metric {last.metric:.4f}{margin} (dense {first.metric:.4f}){agree}, {seconds:.0f} s"
        )

    def removed(self) -> str:
        """The removed heads; with neurons what is left of each kind."""
        first, last = self.steps[0], self.steps[-1]
        if list(first.units) == ["heads"]:
            return f"{first.heads - last.heads} of {first.heads} heads removed"
        return f"{left_text(first.units, last.units)} left"

    def left(self) -> str:
        """The share that is left in the measure of the budget."""
        share = None if self.measure is None else share_left(self.steps[0], self.steps[-1], self.measure)
        return "" if share is None else f", {share:.1%} {LEFT[str(self.measure)]}"

    def curve(self) -> list[Text]:
        """Bars of the metric, scaled from its lowest to its highest value, over the share removed."""
        first = self.steps[0]
        heads = list(first.units) == ["heads"]
        end = f"{first.heads:>7}" if heads else "   100%"
        start = "0 heads removed" if heads else "0% of the FLOPs removed"
        values = [step.metric for step in self.steps if math.isfinite(step.metric)] or [0.0]
        low, high = min(values), max(values)
        columns: list[float | None] = [None] * (WIDTH + 1)
        for step in self.steps:
            if not math.isfinite(step.metric):
                continue
            height = (step.metric - low) / (high - low) if high > low else 1.0
            columns[min(WIDTH, max(0, round(self._share_removed(step) * WIDTH)))] = height
        lines = []
        for row in range(HEIGHT - 1, -1, -1):
            cells = ""
            for share in columns:
                filled = 0 if share is None else round((0.08 + 0.92 * share) * HEIGHT * 8) - row * 8
                cells += EIGHTHS[max(0, min(8, filled))]
            label = f"{high:7.3f} " if row == HEIGHT - 1 else f"{low:7.3f} " if row == 0 else " " * 8
            lines.append(Text(label + cells, style="cyan"))
        lines.append(Text(" " * 8 + f"{start:<{WIDTH - 6}}{end}"))
        return lines

    def _share_removed(self, step: Step) -> float:
        first = self.steps[0]
        if list(first.units) == ["heads"]:
            return (first.heads - step.heads) / max(1, first.heads)
        share = share_left(first, step, "flops")
        return 1 - (step.flops / max(1, first.flops) if share is None else share)


def training_line(logged: Mapping[str, Any]) -> str:
    parts = [f"Training: step {logged['step']} of {logged['steps']}"]
    if "loss" in logged:
        parts.append(f"loss {logged['loss']:.4g}")
    if "open_units" in logged:  # of learned gates
        parts.append(f"{logged['open_units']} units open")
    if "eval_metric" in logged:
        value = f"{logged['metric']} {logged['eval_metric']:.4g}"
        parts.append(f"{value} on held-out data at step {logged['evaluated_step']}")
    return ", ".join(parts)


@dataclass
class Row(Observer):
    """A row of the table: one run of a study."""

    table: ProgressTable
    job: Job
    state: str = "waits"
    last: Step | None = None

    def step(self, step: Step, seconds: Mapping[str, float]) -> None:
        self.replayed(step)

    def replayed(self, step: Step) -> None:
        self.last = step
        self.table.show(self.table.counts)

    def end(self, error: Exception | None = None) -> None:
        self.state = "done" if error is None else "failed"
        at = "" if self.last is None else f" at step {self.last.step}, metric {self.last.metric:.4f}"
        reason = "" if error is None else f": {error}"
        self.table.show(
            lambda: f"{self.title}: {self.state}{at}{reason} ({self.table.counts()})",
            at_once=error is not None or self.last is not None,
        )

    @property
    def title(self) -> str:
        return f"{self.job.name} on {', '.join(self.job.labels)}"


class ProgressTable(Observer):
    """All runs of a study in one table; without a terminal, a line when a run ends, and the counts of states from time
    to time."""

    def __init__(self, display: Display) -> None:
        self.display = display
        self.rows: dict[Job, Row] = {}

    def study(self, jobs: Sequence[Job], finished: Collection[Job]) -> None:
        self.rows = {job: Row(self, job, "done" if job in finished else "waits") for job in jobs}

    def run(self, name: str, job: Any = None, *, again: bool = False) -> Observer:
        row = self.rows[job]
        row.state = "runs again" if again else "runs"
        if again:
            self.show(lambda: f"{row.title}: its process died; it is resumed", at_once=True)
        else:
            self.show(self.counts)
        return row

    def show(self, line: Callable[[], str], *, at_once: bool = False) -> None:
        self.display.show(self.table, line, at_once=at_once)

    def counts(self) -> str:
        counted = Counter(row.state for row in self.rows.values())
        return ", ".join(f"{counted[state]} {state}" for state in reversed(STATES) if counted[state])

    def table(self) -> Table:
        rows = sorted(self.rows.values(), key=lambda row: STATES.index(row.state))
        visible = max(3, self.display.console.height - 4)
        hidden = f" · {len(rows) - visible} not shown" if len(rows) > visible else ""
        table = Table(caption=self.counts() + hidden, caption_justify="left", **LEAN)
        for heading in ("model", "data", "seed", "budget", "criterion", "step", "metric", "state"):
            number = heading in ("seed", "step", "metric")
            table.add_column(heading, justify="right" if number else "left", no_wrap=True)
        for row in rows[:visible]:
            model, data, seed, budget = map(escape, row.job.labels)
            step = ["", ""] if row.last is None else [str(row.last.step), f"{row.last.metric:.4f}"]
            style = STYLES.get(row.state, "")
            state = f"[{style}]{row.state}[/{style}]" if style else row.state
            table.add_row(model, data, seed.removeprefix("seed"), budget, escape(row.job.name), *step, state)
        return table
