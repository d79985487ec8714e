"""Time, taken fairly: what is to be compared takes turns in one process, so that the noise of the machine meets all."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

WARM_UP = 2  # turns that do not count


@dataclass
class Timed:
    """A module, and what it is called with; `before` makes what a call may write into anew, untimed."""

    module: nn.Module
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
    after: Callable[[int], None] | None = None,
) -> dict[Any, list[float]]:
    """Seconds of every run in every turn; `after` hears how many turns are done."""
    seconds: dict[Any, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for turn in range(WARM_UP + repeats):
            for name, run in runs.items():
                taken = once(run, clock)
                if turn >= WARM_UP:
                    seconds[name].append(taken)
            if after is not None:
                after(turn + 1)
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
