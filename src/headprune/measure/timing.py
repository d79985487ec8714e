"""Time, taken fairly: what is to be compared takes turns in one process, so that the noise of the machine meets all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

WARM_UP = 2  # turns that do not count
MORE = 10


@dataclass
class Timed:
    """A module or function, and what it is called with; `before` makes what a call may write into anew, untimed."""

    module: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    before: Callable[[Any], Any] = lambda value: value


Clock = Callable[[], float]


def own_clock(threads: int, device: torch.device) -> Clock:
    """The clock that other programs disturb least. One thread of a processor has a clock of its own, which stands still
    while something else runs; elsewhere it is the one on the wall."""
    return time.thread_time if threads == 1 and device.type == "cpu" else time.perf_counter


def once(run: Timed, clock: Clock) -> float:
    """Seconds of one call."""
    args, kwargs = run.before(run.args), run.before(run.kwargs)
    _wait()
    started = clock()
    run.module(*args, **kwargs)
    _wait()
    return clock() - started


def turns(
    runs: Mapping[Any, Timed],
    repeats: int,
    *,
    clock: Clock = time.perf_counter,
    seconds_at_least: float = 0.0,
) -> dict[Any, list[float]]:
    """Seconds of every run in every turn: of so many turns, or of up to `MORE` times as many where all of them together
    are shorter than asked for."""
    seconds: dict[Any, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for _ in range(WARM_UP):
            for run in runs.values():
                once(run, clock)
        for turn in range(MORE * repeats):
            if turn >= repeats and sum(map(sum, seconds.values())) >= seconds_at_least:
                break
            for name, run in runs.items():
                seconds[name].append(once(run, clock))
    return seconds


@contextmanager
def using_threads(number: int | None) -> Iterator[int]:
    """So many threads of torch for the length of the block, as many as there are where None."""
    before = torch.get_num_threads()
    try:
        if number is not None:
            torch.set_num_threads(number)
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _wait() -> None:
    """Until an accelerator has done what it was given."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
