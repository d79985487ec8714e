"""Energy by the counters of processors (RAPL) and of NVIDIA GPUs (NVML), where they can be read."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

POWERCAP = Path("/sys/class/powercap")  # AMD processors are there as well, under the same name
TURNS = 5
MICRO, MILLI = 1e-6, 1e-3


@dataclass(frozen=True)
class Counter:
    """A counter of joules; where `wraps` is not 0 it starts again after so many."""

    read: Callable[[], float]
    wraps: float = 0.0

    def between(self, before: float, after: float) -> float:
        spent = after - before
        return spent + self.wraps if spent < 0 and self.wraps else max(spent, 0.0)


def counters(device: torch.device) -> list[Counter]:
    """The counters that can be read: of all packages of the processor, and of the GPU that the model is on."""
    return [*_processors(), *(_gpus(device) if device.type == "cuda" else [])]


def _processors() -> list[Counter]:
    """Whole packages; zones inside of them and the whole platform would count energy twice."""
    counters = []
    with suppress(OSError):
        for zone in sorted(POWERCAP.glob("intel-rapl:*")):
            with suppress(OSError, ValueError):  # most systems let only root read it
                if zone.name.count(":") == 1 and (zone / "name").read_text().strip() != "psys":
                    counter = Counter(_reader(zone / "energy_uj"), MICRO * _number(zone / "max_energy_range_uj"))
                    counter.read()
                    counters.append(counter)
    return counters


def _number(file: Path) -> int:
    return int(file.read_text())


def _reader(file: Path) -> Callable[[], float]:
    return lambda: MICRO * _number(file)


def _gpus(device: torch.device) -> list[Counter]:
    with suppress(Exception):  # no package, no driver, or a GPU without a counter
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByIndex(device.index or 0)
        counter = Counter(lambda: MILLI * nvml.nvmlDeviceGetTotalEnergyConsumption(gpu))
        counter.read()
        return [counter]
    return []


def energy_per_thousand(
    runs: Mapping[str, Callable[[], Any]], sequences: int, device: torch.device, *, turns: int = TURNS
) -> dict[str, float] | None:
    """Joules for 1,000 sequences of each run, which takes `sequences` at once; None where it cannot be measured.

    The runs take turns. Energy of other programs that run meanwhile is counted too.
    """
    meters = counters(device)
    if not meters:
        return None
    spent = dict.fromkeys(runs, 0.0)
    try:
        for run in runs.values():
            run()
        for _ in range(turns):
            for name, run in runs.items():
                before = [meter.read() for meter in meters]
                run()
                spent[name] += sum(
                    meter.between(start, meter.read()) for meter, start in zip(meters, before, strict=True)
                )
    except (OSError, ValueError):  # a counter that cannot be read any more
        return None
    if not all(spent.values()):
        return None  # too short for a counter to move
    return {name: 1000 * joules / (turns * sequences) for name, joules in spent.items()}
