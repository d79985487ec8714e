"""Times exported models in their runtime: dense and pruned in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from headprune.exports.check_outputs import GENERATIVE_TASKS, prompt_of
from headprune.exports.runtime import TOKENS, Runner, Runtime, Source
from headprune.measure.timing import TimedCall, time_in_turns
from headprune.tasks import batch_size

REPEATS = 9


def time_runners(runtime: Runtime, runners: Mapping[str, Runner], source: Source, *, threads: int) -> dict[str, Any]:
    """Milliseconds of each for every workload, and how many times as fast the pruned model is as the dense one: medians
    over turns."""
    clock = time.thread_time if runtime.in_caller and threads == 1 else time.perf_counter
    result: dict[str, Any] = {"threads": threads, "repeats": REPEATS}
    for workload, calls in _workloads(runtime, runners, source).items():
        seconds = time_in_turns(calls, REPEATS, clock=clock)
        milliseconds = {name: round(1000 * statistics.median(values), 3) for name, values in seconds.items()}
        if "dense" in seconds:
            milliseconds["speedup"] = round(milliseconds["dense"] / max(milliseconds["pruned"], 1e-3), 3)
        result[workload] = milliseconds
    return result


def _workloads(runtime: Runtime, runners: Mapping[str, Runner], source: Source) -> dict[str, dict[str, TimedCall]]:
    workloads = {}
    if not runtime.log_probabilities:  # which are computed token by token
        prepared = source.task.prepare(source.batch, torch.device("cpu"))
        for size in sorted({1, batch_size(prepared)}):
            inputs = source.task.inputs(source.task.select(prepared, slice(0, size)))
            workloads[f"batch_{size}"] = {name: TimedCall(runner, (), inputs) for name, runner in runners.items()}
    if source.task.name in GENERATIVE_TASKS and all(runner.can_generate() for runner in runners.values()):
        prompt = prompt_of(source)
        workloads[f"generate_{TOKENS}"] = {
            name: TimedCall(partial(runner.generate, prompt, TOKENS)) for name, runner in runners.items()
        }
    return workloads
