"""The speed of pruned models against dense ones: all of them take turns in one run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headprune.measure.timing import TimedCall, choose_clock, time_in_turns

TURNS = 40


def measure_speeds(
    models: Mapping[str, Any], dense: Mapping[str, str], ids: torch.Tensor, *, turns: int = TURNS
) -> dict[str, dict[str, Any]]:
    """Of every model, the median milliseconds of a forward pass on this batch, and how many times as fast it is as the
    model that `dense` names for it: the median over turns of the ratio, with its 95 % interval."""
    clock = choose_clock(torch.get_num_threads(), ids.device)
    calls = {name: TimedCall(model, (), {"input_ids": ids, "use_cache": False}) for name, model in models.items()}
    seconds = time_in_turns(calls, turns, clock=clock)
    result = {}
    for name, taken in seconds.items():
        ratios = [slow / fast for slow, fast in zip(seconds[dense[name]], taken, strict=True)]
        result[name] = {
            "milliseconds": round(1000 * statistics.median(taken), 3),
            "speedup": round(statistics.median(ratios), 4),
            "interval": [round(end, 4) for end in median_interval(ratios)],
        }
    return result


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a median by ranks: how many of n values are below the median is binomial with n and 1/2."""
    ordered, count, below = sorted(values), len(values), 0.0
    for rank in range(count):
        below += math.comb(count, rank) / 2**count
        if below > 0.025:
            return ordered[rank - 1 if rank else 0], ordered[count - rank if rank else -1]
    raise ValueError("No values have no median.")
