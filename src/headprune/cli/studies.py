"""A study in the terminal: its runs while they go on, one row each, and what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from headprune.cli.tables import LEAN
from headprune.errors import HeadpruneError
from headprune.measure.at_budget import AtBudget
from headprune.measure.trajectory import Step
from headprune.report.words import measured_text, spread_text, value_text, verdict_at_budget
from headprune.runs.studies.plan import Job
from headprune.runs.studies.running import Watch
from headprune.runs.studies.summary import Compared, standings

# What is shown first where a screen is too small for all runs.
STATES = ("runs", "runs again", "failed", "waits", "done")
STYLES = {"runs": "cyan", "runs again": "yellow", "failed": "red", "done": "green"}
SILENCE = 10  # seconds between two lines where there is no terminal


@dataclass
class Line:
    """A run as the table has it."""

    state: str = "waits"
    step: Step | None = None


class ProgressTable(Watch):
    """All runs in one table; where there is no terminal, a line when a run ends, and now and then how many have."""

    def __init__(self, console: Console, live: Live | None) -> None:
        self.console, self.live = console, live
        self.lines: dict[Job, Line] = {}
        self.said = time.monotonic()

    def begin(self, jobs: Sequence[Job]) -> None:
        self.lines = {job: Line() for job in jobs}

    def started(self, job: Job, *, again: bool = False) -> None:
        self.lines[job].state = "runs again" if again else "runs"
        if again and self.live is None:
            self._say(f"{_title(job)}: its process died; it goes on from its journal")
        self._show()

    def stepped(self, job: Job, step: Step) -> None:
        self.lines[job].step = step
        if self.live is None and time.monotonic() - self.said > SILENCE:
            self._say(self.counts())
        self._show()

    def ended(self, job: Job, error: HeadpruneError | None = None) -> None:
        line = self.lines[job]
        line.state = "done" if error is None else "failed"
        if self.live is None and (error is not None or line.step is not None):
            step = line.step
            how = "" if step is None else f" at step {step.step}, metric {step.metric:.4f}"
            self._say(f"{_title(job)}: {line.state}{how}{'' if error is None else f': {error}'} ({self.counts()})")
        self._show()

    def counts(self) -> str:
        found = Counter(line.state for line in self.lines.values())
        return ", ".join(f"{found[state]} {state}" for state in reversed(STATES) if found[state])

    def table(self) -> Table:
        rows = sorted(self.lines.items(), key=lambda item: STATES.index(item[1].state))
        room = max(3, self.console.height - 4)
        shown = rows if len(rows) <= room else rows[:room]
        hidden = f" · {len(rows) - len(shown)} not shown" if len(shown) < len(rows) else ""
        table = Table(caption=self.counts() + hidden, caption_justify="left", **LEAN)
        for heading in ("model", "data", "seed", "budget", "criterion", "step", "metric", "state"):
            number = heading in ("seed", "step", "metric")
            table.add_column(heading, justify="right" if number else "left", no_wrap=True)
        for job, line in shown:
            model, data, seed, budget = map(escape, job.place)
            step = ["", ""] if line.step is None else [str(line.step.step), f"{line.step.metric:.4f}"]
            style = STYLES.get(line.state, "")
            state = f"[{style}]{line.state}[/{style}]" if style else line.state
            table.add_row(model, data, seed.removeprefix("seed"), budget, escape(job.name), *step, state)
        return table

    def _show(self) -> None:
        if self.live is not None:
            self.live.update(self.table())

    def _say(self, text: str) -> None:
        self.said = time.monotonic()
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _title(job: Job) -> str:
    return f"{job.name} on {', '.join(job.place)}"


@contextmanager
def progress_table() -> Iterator[ProgressTable]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressTable(console, None)
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield ProgressTable(console, live)


def print_at_budget(out: Path, rows: Sequence[AtBudget], console: Console | None = None) -> None:
    """Models at the same budget, best first, and which differences are real."""
    console = console or Console()
    name = rows[0].measured.name
    table = Table(
        title="Best first at this budget",
        title_justify="left",
        caption=escape("[low, high]: 95% interval · left: of the dense model"),
        caption_justify="left",
        **LEAN,
    )
    table.add_column("criterion", overflow="fold", min_width=9)
    for heading in (name, "agreement", "parameters\nleft", "FLOPs\nleft"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        several = f" ({len(row.runs)} runs)" if len(row.runs) > 1 else ""
        measured = measured_text(name, row.metric, row.interval)
        between = spread_text(name, row.spread)
        left = ("-" if row.shares[part] is None else f"{row.shares[part]:.1%}" for part in ("parameters", "flops"))
        table.add_row(
            escape(row.name + several),
            escape(measured + (f"\n{between}" if between else "")),
            value_text("agreement", row.agreement),
            *left,
        )
    console.print(table)
    console.print()
    for sentence in verdict_at_budget(rows):
        console.print(sentence, highlight=False, markup=False)
    console.print(f"The runs are in {escape(str(out))}.", highlight=False)


def print_study(out: Path, found: Sequence[Compared], console: Console | None = None) -> None:
    """The best of every comparison, and the criteria by their mean rank over all of them."""
    console = console or Console()
    table = Table(title="Comparisons", title_justify="left", **LEAN)
    for heading in ("model", "data", "seed", "budget", "best", "value", "then"):
        number = heading in ("seed", "value")
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for one in found:
        model, data, seed, budget = map(escape, one.group.place)
        first = one.rows[0]
        value = (
            measured_text(first.measured.name, first.metric, first.interval)
            if isinstance(first, AtBudget)
            else f"area {first.usable_area:.4f}"
        )
        then = escape(one.rows[1].name) if len(one.rows) > 1 and one.best else "-"
        table.add_row(
            model,
            data,
            seed.removeprefix("seed"),
            budget,
            escape(one.best or "-"),
            escape(value) if one.best else "-",
            then,
        )
    console.print(table)
    console.print()
    overall = Table(title="Criteria over all of them", title_justify="left", **LEAN)
    for heading in ("criterion", "mean rank", "best in"):
        overall.add_column(heading, justify="left" if heading == "criterion" else "right", overflow="fold")
    for standing in standings(found):
        overall.add_row(escape(standing.name), f"{standing.mean_rank:.2f}", f"{standing.best_in} of {standing.groups}")
    console.print(overall)
    console.print(
        f"Each comparison has its page; sweep.json and sweep.csv in {escape(str(out))} have all.", highlight=False
    )
