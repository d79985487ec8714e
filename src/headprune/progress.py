"""Progress of long work: loops report the phase they are in and how far it is, and whoever started them shows it.

A display, such as the method `phase` of an observer, listens with `reporting_to`; a loop reports with `tracked` or
`report_phase`. What is reported where nobody listens is dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from headprune.display import counted, plural

Item = TypeVar("Item")
LINE_SECONDS = 10  # seconds between two lines without a terminal


@dataclass(frozen=True)
class Phase:
    """What is being done, and how much of it is done; `total` is None where that is not known."""

    name: str
    done: int = 0
    total: int | None = None
    unit: str = ""  # singular

    def __str__(self) -> str:
        return self.name if self.total is None else f"{self.name}, {self.done} of {counted(self.total, self.unit)}"


Listener = Callable[[Phase], None]
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)  # one per thread


@contextmanager
def reporting_to(listener: Listener) -> Iterator[None]:
    """Within a block, phases are reported to this listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report_phase(phase: Phase) -> None:
    listener = _listener.get()
    if listener is not None:
        listener(phase)


def tracked(
    items: Iterable[Item],
    name: str,
    total: int | None = None,
    *,
    unit: str,
    size: Callable[[Item], int] = lambda item: 1,
) -> Iterator[Item]:
    """The items, one by one, each of which counts as `size` units; it is reported as done when the next is
    requested."""
    done = 0
    if total != 0:  # nothing to do is no phase
        report_phase(Phase(name, done, total, unit))
    for item in items:
        yield item
        done += size(item)
        report_phase(Phase(name, done, total, unit))


def shows_progress(show: bool | None) -> bool:
    """`show` where it is set, otherwise whether stderr is a terminal or this is a notebook."""
    return _has_bars() if show is None else show


def _has_bars() -> bool:
    terminal = sys.stderr is not None and sys.stderr.isatty()
    return terminal or "ipykernel" in sys.modules


def progress_bar(description: str, total: int | None, *, unit: str, show: bool | None = None) -> Any:
    """A bar of tqdm on stderr, or a widget in a notebook, to be used as a context manager; it is
    disabled where `shows_progress` is False."""
    from tqdm.auto import tqdm

    return tqdm(
        total=total,
        desc=description,
        unit=f" {unit}",
        disable=not shows_progress(show),
        dynamic_ncols=True,
        mininterval=0.1 if _has_bars() else LINE_SECONDS,
        miniters=0,  # only the interval decides when it is drawn again, as it may show another phase at the same count
    )


@contextmanager
def phase_bar(title: str, show: bool | None = None) -> Iterator[None]:
    """Within a block, a bar of the current phase; where it is not shown, phases are reported as without the block."""
    if not shows_progress(show):
        yield
        return
    with progress_bar(title, None, unit="", show=True) as bar:

        def draw(phase: Phase) -> None:
            bar.total, bar.n, bar.unit = phase.total, phase.done, f" {plural(phase.unit)}" if phase.unit else ""
            describe_phase(bar, title, phase.name)

        with reporting_to(draw):
            yield


def describe_phase(bar: Any, title: str, text: str) -> None:
    """Show a text beside the title of a bar, if it is time to draw the bar again."""
    bar.set_description_str(f"{title}: {text}" if text else title, refresh=False)
    bar.update(0)
