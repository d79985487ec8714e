"""A run as it happens: the curve so far, drawn in the terminal on stderr."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from headprune.measure.at_budget import share_left
from headprune.report.words import left_text

if TYPE_CHECKING:
    from headprune.measure.trajectory import Step
    from headprune.search.layerwise.prune_layer import PrunedLayer

WIDTH, HEIGHT = 64, 10
LEFT = {
    "parameters": "of the parameters",
    "memory": "of the memory",
    "flops": "of the FLOPs",
    "latency": "of the time",
}
EIGHTHS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"


class LiveCurve:
    """Called with every step; draws the metric over the heads removed, and one line on where the run is. Where neurons
    go as well, over the FLOPs removed: a head is worth hundreds of them. `measure` is what a budget counts."""

    def __init__(self, title: str, live: Live | None, console: Console, measure: str | None = None) -> None:
        self.title, self.live, self.console, self.measure = title, live, console, measure
        self.steps: list[Step] = []
        self.started = self.drawn = time.monotonic()

    def start(self, title: str) -> None:
        """A new run begins."""
        self.title = title
        self.steps = []

    def __call__(self, step: Step) -> None:
        self.steps.append(step)
        now = time.monotonic()
        if self.live is not None:
            self.live.update(Group(*self.curve(), self.status()))
        elif now - self.drawn > 10 or step.left == 0:  # not a terminal: a line now and then
            self.drawn = now
            self.console.print(self.status(), highlight=False, soft_wrap=True)

    def layer(self, done: int, layers: int, swept: PrunedLayer) -> None:
        """A sweep has passed one more layer."""
        gone = len(swept.removed)
        seconds = time.monotonic() - self.started
        text = Text(
            f"{self.title}: layer {done} of {layers} done ({gone} units removed at {swept.layer}), {seconds:.0f} s"
        )
        now = time.monotonic()
        if self.live is not None:
            self.live.update(text)
        elif now - self.drawn > 10:
            self.drawn = now
            self.console.print(text, highlight=False, soft_wrap=True)

    def status(self) -> Text:
        first, last = self.steps[0], self.steps[-1]
        agree = "" if last.agreement is None else f", agreement {last.agreement:.3f}"
        between = last.interval
        known = between is not None and math.isfinite(between.high - between.low)
        sure = f" ± {(between.high - between.low) / 2:.2g}" if between is not None and known else ""
        seconds = time.monotonic() - self.started
        return Text(
            f"{self.title}: {self.removed()}{self.left()}, "
            f"metric {last.metric:.4f}{sure} (dense {first.metric:.4f}){agree}, {seconds:.0f} s"
        )

    def removed(self) -> str:
        """What has gone of each kind: that which a run does not touch is not said."""
        first, last = self.steps[0], self.steps[-1]
        if list(first.units) == ["heads"]:
            return f"{first.heads - last.heads} of {first.heads} heads removed"
        return f"{left_text(first.units, last.units)} left"

    def left(self) -> str:
        """What is left in the measure that a budget counts."""
        share = None if self.measure is None else share_left(self.steps[0], self.steps[-1], self.measure)
        return "" if share is None else f", {share:.1%} {LEFT[str(self.measure)]}"

    def curve(self) -> list[Text]:
        """Bars of the metric, scaled from its lowest to its highest value, over all that can go."""
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
            columns[min(WIDTH, max(0, round(self._gone(step) * WIDTH)))] = height
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

    def _gone(self, step: Step) -> float:
        first = self.steps[0]
        if list(first.units) == ["heads"]:
            return (first.heads - step.heads) / max(1, first.heads)
        share = share_left(first, step, "flops")
        return 1 - (step.flops / max(1, first.flops) if share is None else share)


@contextmanager
def live_curve(title: str, measure: str | None = None) -> Iterator[LiveCurve]:
    console = Console(stderr=True)
    if not console.is_terminal:
        yield LiveCurve(title, None, console, measure)
        return
    with Live(console=console, refresh_per_second=4) as live:
        yield LiveCurve(title, live, console, measure)
