"""Times calls that are to be compared: they take turns in one process, so that noise of the machine affects all
alike."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from headprune.progress import tracked

WARM_UP = 2  # turns that are not counted
MORE = 10  # times as many turns at most, where calls are short


@dataclass
class TimedCall:
    """A module or function and its arguments; `before` copies arguments that a call may write into, untimed."""

    module: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    before: Callable[[Any], Any] = lambda value: value


Clock = Callable[[], float]


def choose_clock(threads: int, device: torch.device) -> Clock:
    """The clock that other programs disturb least: CPU time of the thread where there is only one on a CPU, else wall
    time."""
    return time.thread_time if threads == 1 and device.type == "cpu" else time.perf_counter


def time_once(run: TimedCall, clock: Clock) -> float:
    """Seconds of one call."""
    args, kwargs = run.before(run.args), run.before(run.kwargs)
    _synchronize()
    started = clock()
    run.module(*args, **kwargs)
    _synchronize()
    return clock() - started


def time_in_turns(
    runs: Mapping[Any, TimedCall],
    repeats: int,
    *,
    clock: Clock = time.perf_counter,
    seconds_at_least: float = 0.0,
    phase: str = "timing",
) -> dict[Any, list[float]]:
    """Seconds of every run in every turn: of `repeats` turns, or of up to `MORE` times as many until all of them
    together took `seconds_at_least`. Progress is reported as this `phase`."""
    seconds: dict[Any, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        # Progress is that of the first turns: further ones together take `seconds_at_least`.
        turns = list(itertools.product(range(WARM_UP + repeats), runs.items()))
        for turn, (name, run) in tracked(turns, phase, len(turns), unit="pass"):
            taken = time_once(run, clock)
            if turn >= WARM_UP:
                seconds[name].append(taken)
        for _ in range((MORE - 1) * repeats):
            if sum(map(sum, seconds.values())) >= seconds_at_least:
                break
            for name, run in runs.items():
                seconds[name].append(time_once(run, clock))
    return seconds


@contextmanager
def using_threads(number: int | None) -> Iterator[int]:
    """A number of torch threads within a block; None leaves it as it is."""
    before = torch.get_num_threads()
    try:
        if number is not None:
            torch.set_num_threads(number)
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def _synchronize() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
