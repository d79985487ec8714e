"""How long exported models take: dense and pruned by turns, in the runtime that they are for."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from headprune.measure.timing import Timed, turns
from headprune.runtimes.check import WRITING, prompt_of
from headprune.runtimes.spec import TOKENS, Runner, Runtime, Source
from headprune.tasks import batch_size, rows_of

REPEATS = 9


def timed(runtime: Runtime, runners: Mapping[str, Runner], source: Source, *, threads: int) -> dict[str, Any]:
    """Milliseconds of each by what it was asked to do, and how many times as fast the pruned model is as the dense one:
    medians over turns."""
    clock = time.thread_time if runtime.in_caller and threads == 1 else time.perf_counter
    found: dict[str, Any] = {"threads": threads, "repeats": REPEATS}
    for what, calls in _workloads(runtime, runners, source).items():
        seconds = turns(calls, REPEATS, clock=clock)
        one = {name: round(1000 * statistics.median(values), 3) for name, values in seconds.items()}
        if "dense" in seconds:
            one["speedup"] = round(one["dense"] / max(one["pruned"], 1e-3), 3)
        found[what] = one
    return found


def _workloads(runtime: Runtime, runners: Mapping[str, Runner], source: Source) -> dict[str, dict[str, Timed]]:
    found = {}
    if not runtime.log_probabilities:  # which are asked for one by one
        prepared = source.task.prepare(source.batch, torch.device("cpu"))
        for size in sorted({1, batch_size(prepared)}):
            inputs = source.task.inputs(rows_of(prepared, slice(0, size)))
            found[f"batch_{size}"] = {name: Timed(runner, (), inputs) for name, runner in runners.items()}
    if source.task.name in WRITING and all(runner.can_generate() for runner in runners.values()):
        prompt = prompt_of(source)
        found[f"generate_{TOKENS}"] = {
            name: Timed(partial(runner.generate, prompt, TOKENS)) for name, runner in runners.items()
        }
    return found
