"""Progress on stderr: a bar, the curve of a run so far, or a table of all runs of a study."""

from __future__ import annotations

import math
import threading
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
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headprune import distributed
from headprune.cli.table_style import LEAN
from headprune.display import counted
from headprune.measure.compare_at_budget import share_left
from headprune.progress import LINE_SECONDS, Phase
from headprune.reports.format import left_text
from headprune.search.observers import Observer, Observers, reporting_phases

if TYPE_CHECKING:
    from headprune.measure.trajectory import Step
    from headprune.runs.studies.study_runs import Job
    from headprune.search.layerwise.prune_layer import PrunedLayer

WIDTH, HEIGHT = 64, 10
BAR_WIDTH = 24
DRAW_SECONDS = 0.1  # between two states of a phase on a terminal
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


class Display:
    """Updates a display in place on a terminal (`live`); elsewhere prints a line from time to time. It writes to
    stderr, as stdout is for results."""

    def __init__(self, console: Console, live: Live | None) -> None:
        self.console, self.live = console, live
        self.printed = time.monotonic()  # when the last line was
        self.drawn = -math.inf  # when the terminal was updated last
        self.line: Callable[[], str] | None = None
        self._lock = threading.Lock()

    def show(
        self,
        render: Callable[[], RenderableType],
        line: Callable[[], str],
        *,
        at_once: bool = False,
        brief: bool = False,
    ) -> None:
        """Lines are printed now and then, or `at_once`. A `brief` state is not drawn on a terminal where the last one
        was drawn a moment ago."""
        if self.live is None:
            self.line = line
            self.print_line(at_once=at_once)
        elif not brief or time.monotonic() - self.drawn > DRAW_SECONDS:
            self.drawn = time.monotonic()
            self.live.update(render())

    def print_line(self, *, at_once: bool = False) -> None:
        """Print the current line, if it is time."""
        with self._lock:
            if self.line is not None and (at_once or time.monotonic() - self.printed > LINE_SECONDS):
                self.printed = time.monotonic()
                self.console.print(self.line(), highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Print lines also while nothing happens, such as in a batch of a large model."""
        done = threading.Event()

        def repeat() -> None:
            while not done.wait(1):
                self.print_line()

        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


@contextmanager
def _display(*, transient: bool = False) -> Iterator[Display]:
    """A display, which disappears in the end if it is `transient`."""
    console = Console(stderr=True)
    if not console.is_terminal:
        display = Display(console, None)
        with display.repeating():
            yield display
        return
    with Live(console=console, refresh_per_second=4, transient=transient) as live:
        yield Display(console, live)


@contextmanager
def live_curve(title: str, measure: str | None = None) -> Iterator[LiveCurve]:
    with _display() as display:
        curve = LiveCurve(title, display, measure)
        try:
            yield curve
        finally:
            curve.current_phase = None
            if display.live is not None:
                display.live.update(curve.render())


@contextmanager
def live_phases(title: str) -> Iterator[None]:
    """Within a block, shows the phase that work is in."""
    with _display(transient=True) as display, reporting_phases(LiveCurve(title, display)):
        yield


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
        self.text = ""  # the last line about a training or a layer
        self.current_phase: Phase | None = None
        self.started = time.monotonic()
        self.step_printed = -math.inf  # when the last line about a step was

    def run(self, name: str, job: Any = None, *, again: bool = False) -> Observer:
        self.title = name
        self.steps, self.current_phase = [], None
        return self

    def step(self, step: Step, seconds: Mapping[str, float]) -> None:
        self.replayed(step)

    def replayed(self, step: Step) -> None:
        self.steps.append(step)
        self.current_phase, self.text = None, ""
        # Lines about phases do not delay those about steps.
        at_once = step.left == 0 or time.monotonic() - self.step_printed > LINE_SECONDS
        self.step_printed = time.monotonic() if at_once else self.step_printed
        self.display.show(self.render, lambda: self.status().plain, at_once=at_once)

    def phase(self, phase: Phase) -> None:
        self.current_phase = phase
        self.display.show(
            self.render, lambda: f"{self.title}: {phase}, {time.monotonic() - self.started:.0f} s", brief=True
        )

    def render(self) -> RenderableType:
        """The curve and the status after the last step, or the last line of a training; below, the phase."""
        shown: list[RenderableType] = [*self.curve(), self.status()] if self.steps and not self.text else []
        if self.text:
            shown.append(Text(self.text))
        if self.current_phase is not None:
            title = "" if shown else f"{self.title}: "
            shown.append(phase_row(title, self.current_phase))
        return Group(*shown)

    def layer(self, done: int, layers: int, pruned: PrunedLayer) -> None:
        units = len(pruned.removed)
        seconds = time.monotonic() - self.started
        self._line(
            f"{self.title}: layer {done} of {layers} done ({counted(units, 'unit')} removed at {pruned.layer}), "
            f"{seconds:.0f} s"
        )

    def log(self, entry: Mapping[str, Any]) -> None:
        """Show one line about a training: the step, the loss, the metric before it and its last value."""
        if entry["step"] < self.logged.get("step", 0):  # the next training
            self.logged = {}
        if not {"loss", "eval_metric"} & set(entry):
            return
        if "eval_metric" in entry:
            self.logged["evaluated_step"] = entry["step"]
        self.logged |= entry
        self._line(training_line(self.logged))

    def _line(self, text: str) -> None:
        self.text, self.current_phase = text, None
        self.display.show(self.render, lambda: text)

    def status(self) -> Text:
        first, last = self.steps[0], self.steps[-1]
        agree = "" if last.agreement is None else f", agreement {last.agreement:.3f}"
        interval = last.interval
        half = 0.0 if interval is None else (interval.high - interval.low) / 2
        margin = f" ± {half:.2g}" if half and math.isfinite(half) else ""
        seconds = time.monotonic() - self.started
        return Text(
            f"{self.title}: {self.removed()}{self.left()}, "
            f"metric {last.metric:.4f}{margin} (dense {first.metric:.4f}){agree}, {seconds:.0f} s"
        )

    def removed(self) -> str:
        """The removed heads; with neurons what is left of each kind."""
        first, last = self.steps[0], self.steps[-1]
        if list(first.units) == ["heads"]:
            return f"{first.heads - last.heads} of {counted(first.heads, 'head')} removed"
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


def phase_row(title: str, phase: Phase) -> Table:
    """A phase with a bar, where its length is known."""
    row = Table.grid(padding=(0, 1))
    cells: list[RenderableType] = [Text(f"{title}{phase}")]
    if phase.total:
        cells.append(ProgressBar(total=phase.total, completed=phase.done, width=BAR_WIDTH))
    row.add_row(*cells)
    return row


def training_line(logged: Mapping[str, Any]) -> str:
    parts = [f"Training: step {logged['step']} of {logged['steps']}"]
    if "loss" in logged:
        parts.append(f"loss {logged['loss']:.4g}")
    if "open_units" in logged:  # of learned gates
        parts.append(f"{counted(logged['open_units'], 'unit')} open")
    if "before" in logged:
        parts.append(f"{logged['metric']} {logged['before']:.4g} before training")
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
    current_phase: Phase | None = None

    def step(self, step: Step, seconds: Mapping[str, float]) -> None:
        self.replayed(step)

    def replayed(self, step: Step) -> None:
        self.last, self.current_phase = step, None
        self.table.show(self.table.counts)

    def phase(self, phase: Phase) -> None:
        self.current_phase = phase
        self.table.show(lambda: f"{self.title}: {phase} ({self.table.counts()})", brief=True)

    def end(self, error: Exception | None = None) -> None:
        self.state, self.current_phase = "done" if error is None else "failed", None
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

    def show(self, line: Callable[[], str], *, at_once: bool = False, brief: bool = False) -> None:
        self.display.show(self.table, line, at_once=at_once, brief=brief)

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
            state += "" if row.current_phase is None else escape(f": {row.current_phase}")
            table.add_row(model, data, seed.removeprefix("seed"), budget, escape(row.job.name), *step, state)
        return table
