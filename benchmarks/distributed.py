"""A score pass by two processes of one thread each, against one process of one thread.

    python -m benchmarks.distributed [--out FILE.json] [--criteria A,B] [--quick]

One process and two take turns, in one run. Efficiency is half of one process's time over that of the slower of two,
their communication included: in time of their processors, which a busy machine does not stretch, and by the
clock, which it does. The time of a processor includes what a process spends on sending and receiving, and not what it
waits for another; so the work that one does alone while the other waits is counted as well, as the slower one has it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

import headprune
from benchmarks.score import bert, data
from headprune import distributed

CRITERIA = ("gnorm", "residual-gradient", "elimination")
RESULTS = Path(__file__).parent / "results" / "distributed.json"


def slowest_pass(processes: int, criterion: str, model: Any, batches: Sequence[Any]) -> dict[str, float]:
    """Seconds of one pass, of the slowest process; forks, so that nothing is imported or built again."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    readers, children = [], []
    for number in range(processes):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.write(
                    writer, json.dumps(_timed_score(number, processes, store.port, criterion, model, batches)).encode()
                )
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        readers.append(reader)
        children.append(child)
    times = []
    for reader in readers:
        with os.fdopen(reader) as stream:
            times.append(json.loads(stream.read()))
    for child in children:
        os.waitpid(child, 0)
    return {name: max(seconds[name] for seconds in times) for name in ("processor", "clock")}


def _timed_score(
    number: int, processes: int, port: int, criterion: str, model: Any, batches: Sequence[Any]
) -> dict[str, float]:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(processes))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    distributed.start()
    headprune.score(model, batches[:2], criterion=criterion)  # warm-up
    distributed.all_gather(None)
    processor, clock = time.process_time(), time.perf_counter()
    headprune.score(model, batches, criterion=criterion)
    return {"processor": time.process_time() - processor, "clock": time.perf_counter() - clock}


def compare(criterion: str, rounds: int, samples: int) -> dict[str, Any]:
    """Medians over rounds in which one process and two take turns."""
    model, batches = bert(384, 6, 12), data(samples)
    one, two = [], []
    for _ in range(rounds):
        one.append(slowest_pass(1, criterion, model, batches))
        two.append(slowest_pass(2, criterion, model, batches))
    result: dict[str, Any] = {"criterion": criterion, "samples": samples, "rounds": rounds}
    for name in ("processor", "clock"):
        times = [statistics.median(run[name] for run in runs) for runs in (one, two)]
        result[name] = {
            "one": round(times[0], 3),
            "two": round(times[1], 3),
            "efficiency": round(times[0] / (2 * times[1]), 3),
        }
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--criteria", default=",".join(CRITERIA))
    options = parser.parse_args(arguments)
    rounds, samples = (3, 128) if options.quick else (5, 256)
    torch.set_num_threads(1)
    rows = []
    for criterion in options.criteria.split(","):
        rows.append(row := compare(criterion, rounds, samples))
        efficiencies = ", ".join(f"{row[name]['efficiency']:.3f} by the {name}" for name in ("processor", "clock"))
        print(f"{criterion}: efficiency of two processes {efficiencies}", flush=True)
        about = {"model": "BERT, 6 layers of 12 heads, width 384, random weights", "processors": os.cpu_count()}
        options.out.write_text(json.dumps({**about, "torch": torch.__version__, "passes": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
