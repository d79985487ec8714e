"""Run directories with made-up numbers: what reports are tested on, without training anything."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headprune.measure.intervals import interval
from headprune.measure.trajectory import Step
from headprune.run_folder import Run
from headprune.runs.experiment import Experiment, settings_of
from headprune.units.members import Head, Member

EVIL = "<script>alert(1)</script>\"'</title><img src=x onerror=alert(2)>${alert(3)}"


def make_run(
    folder: Path,
    heads: Sequence[int] = (4, 4, 4),
    *,
    seed: int = 0,
    every: int = 1,
    sizes: Sequence[int] = (),
    stop: float | None = 0.5,
    steps: int | None = None,
    measured: str = "accuracy",
    values: Sequence[float] | None = None,
    scores: float | None = None,
    savings: bool = True,
    repaired: Sequence[float] = (),
    samples: int = 0,
    neurons: Sequence[int] = (),
    **settings: Any,
) -> Path:
    """A run directory as `prune` leaves it, whose steps take `every` heads each, or as many as `sizes` say. `stop`
    is the share of steps at which it stopped, None for a run that has not come to its end; `values` are those of
    the metric `measured`, `scores` is one value for all scores; `repaired` is the part of each step's error, from
    the first on, that compensation made up for. With `samples`, the metric is that of so many samples, each right
    up to a step of its own, and every step has an interval and outcomes. With `neurons`, widths of feed-forward
    layers, every step takes some of these as well, and the first runs empty first."""
    rng = random.Random(seed)
    bend = rng.uniform(0.2, 1.5)
    units = [Head(site, head) for site, count in enumerate(heads) for head in range(count)]
    order = rng.sample(units, len(units))
    journal: list[Step] = []
    gone: list[Head] = []
    table = torch.full((len(heads), max(heads)), math.nan, dtype=torch.float64)
    for head in units:
        table[head.site, head.index] = rng.random() if scores is None else scores
    sizes = sizes or [every] * (len(units) // every if steps is None else steps)
    for number, size in enumerate([0, *sizes]):
        removed = tuple(order[len(gone) : len(gone) + size])
        now = table.clone()
        for head in gone:
            now[head.site, head.index] = math.nan
        gone += removed
        left = len(units) - len(gone)
        metric = values[number] if values else 0.5 + 0.4 * (left / len(units)) ** bend - 0.02 * rng.random()
        per_sample = measured_on(samples, metric) if samples else None
        journal.append(
            Step(
                step=number,
                removed=removed,
                score=0.1 if number else None,
                metric=metric if per_sample is None else float(per_sample.mean()),
                agreement=left / len(units),
                loss=1.0 - left / len(units),
                units={"heads": left},
                applied={"heads": left},
                parameters=1_000_000 + 10_000 * left,
                flops=1_000 * left,
                scores=now if number else None,
                repairs=tuple(
                    {"site": head.site, "kind": "lstsq", "error_without": 4.0, "error": 4.0 * (1 - share)}
                    for head, share in zip(removed, repaired[number - 1 : number], strict=False)
                ),
                interval=None if per_sample is None else interval(per_sample),
                per_sample=per_sample,
            )
        )
    if neurons:
        journal = _with_neurons(journal, heads, neurons)
    with Run(folder, settings_of(Experiment(**{"model": "org/tiny-bert", "data": "data.csv", **settings}))) as run:
        run.steps = journal  # as Run.step leaves it, without a sync to disk after every line
        (folder / "steps.jsonl").write_text("".join(json.dumps(step.to_json()) + "\n" for step in journal))
        if stop is not None:
            run.finish(_record(journal, heads, int(stop * (len(journal) - 1)), measured, savings))
    return folder


def _with_neurons(journal: list[Step], heads: Sequence[int], neurons: Sequence[int]) -> list[Step]:
    """The same steps of a run that takes neurons as well: at every step a share of each layer, most of the first."""
    first, last = len(heads), max(1, len(journal) - 1)
    result = []
    before = dict(enumerate(neurons, first))
    for step in journal:
        reach = {first + row: min(1.0, step.step / last * (1.6 - row / len(neurons))) for row in range(len(neurons))}
        now = {site: round(neurons[site - first] * (1 - share)) for site, share in reach.items()}
        gone = [Member(site, neuron) for site in now for neuron in range(now[site], before[site])]
        table = None
        if step.scores is not None:
            table = torch.full((first + len(neurons), max(*heads, *neurons)), math.nan, dtype=torch.float64)
            table[:first, : max(heads)] = step.scores
            for site, width in before.items():
                table[site, :width] = torch.arange(width, dtype=torch.float64)
        units = {**step.units, "neurons": sum(now.values())}
        result.append(
            dataclasses.replace(
                step,
                removed=(*step.removed, *gone),
                units=units,
                applied=units,
                scores=table,
                flops=step.flops + 10 * sum(now.values()),
                attention=(first, max(heads)),
                widths=now,
            )
        )
        before = now
    return result


def measured_on(samples: int, share: float) -> torch.Tensor:
    """About this share of the samples is right, the same ones first: runs differ where they differ in their share."""
    return (torch.arange(samples) < share * samples).double()


def _record(journal: list[Step], heads: Sequence[int], stop: int, metric: str, savings: bool) -> dict[str, Any]:
    gone = {head for step in journal[: stop + 1] for head in step.removed_heads}
    widths = {str(site): [width, journal[stop].widths[site]] for site, width in journal[0].widths.items()}
    wide = range(max(heads))
    result = {
        "step": stop,
        "steps": len(journal) - 1,
        "rule": "keep 0.5",
        "metric": metric,
        "higher_is_better": metric != "perplexity",
        "dense": journal[0].metric,
        "pruned": journal[stop].metric,
        **{
            f"{name}_interval": None if step.interval is None else list(step.interval)
            for name, step in (("dense", journal[0]), ("pruned", journal[stop]))
        },
        "agreement": journal[stop].agreement,
        "heads_before": journal[0].heads,
        "heads_after": journal[stop].heads,
        "mask": [[int(h < count and (s, h) not in gone) for h in wide] for s, count in enumerate(heads)],
        **({"units": {kind: [n, journal[stop].units[kind]] for kind, n in journal[0].units.items()}} if widths else {}),
        **({"widths": widths} if widths else {}),
    }
    record: dict[str, Any] = {"samples": {"calibration": 16, "evaluation": 64}, "result": result}
    if savings:
        cost = {"megabytes_on_disk": None, "flops": 9_000_000, "head_flops": 400, "peak_memory_megabytes": 9.5}
        times = {"dense": 4.0, "pruned": 3.0, "ratio": 0.75}
        record["savings"] = {
            name: {
                **cost,
                "heads": step.heads,
                "parameters": step.parameters,
                "modules": {"embeddings": 1_000_000, "encoder": step.parameters - 1_000_000},
                "megabytes": 4.0,
            }
            for name, step in (("dense", journal[0]), ("pruned", journal[stop]))
        }
        latency = {"threads": 1, "repeats": 7, "tokens": 32, "batch_1": times, "batch_32": times}
        record["savings"]["latency"] = latency
        record["savings"]["note"] = "Attention heads are 4% of this model's FLOPs."
    return record
