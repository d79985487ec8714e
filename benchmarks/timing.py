"""Timing that a noisy machine cannot spoil: the sides take turns, and medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def interleaved(repeats: int, *sides: Callable[[], Any]) -> list[float]:
    """Median seconds of each side, the sides taking turns."""
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, seconds in zip(sides, times, strict=True):
            started = time.perf_counter()
            side()
            seconds.append(time.perf_counter() - started)
    return [statistics.median(seconds) for seconds in times]
