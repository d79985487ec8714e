"""Published methods at the same budgets: how good is a model with 80, 60, 50 and 40 % of the FLOPs of its units left?

    python -m benchmarks.budgets [--models A,B] [--methods A,B] [--shares 0.8,0.5] [--seeds 0,1,2] [--long] [--out F]

Every cell, a model, a method, a share and a seed of the calibration data, comes from a run of `headprune.prune` from
the dense model: one of its own, or, where a method goes in rounds, one through all shares. Cells are written to the
file as they come, and those that it has already are not run again, so it can be stopped at any time. A cell that fails
says why, and is tried again next time. The models are those of benchmarks/benchmark_models.py that are available;
`--long` takes SmolLM2-135M as well. The table is written as markdown beside.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel

import headprune
from benchmarks.benchmark_models import LANGUAGE_MODELS, LONG, MAKERS, BenchmarkModel, available
from headprune.criteria.registry import split_names
from headprune.measure.costs import flops
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import METRICS, Metric
from headprune.search.methods import METHODS, method_named
from headprune.units import all_sites

OURS = "headprune"
SHARES = (0.8, 0.6, 0.5, 0.4)
SEEDS = (0, 1, 2)
OUT = Path("benchmarks/results/budgets.json")
KEY = ("model", "method", "share", "seed")
Cell = dict[str, Any]


CALIBRATION = {"minilm-sst2": 256}  # samples, where they are others than a model has in other benchmarks


@cache
def load_model(name: str) -> BenchmarkModel:
    model = {**MAKERS, **LONG}[name]()
    return replace(model, calibration_samples=CALIBRATION.get(name, model.calibration_samples))


def metric_of(name: str) -> Metric:
    return METRICS["perplexity" if name in LANGUAGE_MODELS else "accuracy"]


def quality(model: PreTrainedModel, chosen: BenchmarkModel) -> float:
    predictions = Evaluator(chosen.evaluation, cache_bytes=0)(model, all_sites(model))
    return float(metric_of(chosen.name).of(predictions).value)


@cache
def dense_quality(name: str) -> float:
    return quality(load_model(name).model, load_model(name))


def total_share(model: PreTrainedModel, share: float) -> float:
    """The share of all FLOPs at which this share of those of heads and neurons is left."""
    counted = flops(model, all_sites(model))
    return (counted.total - (1 - share) * counted.units_total) / counted.total


def add_biases(model: PreTrainedModel) -> None:
    """Output biases of 0 where a model has none: FLAP's paper adds them, and puts means there."""
    for site in all_sites(model):
        output: Any = model.get_submodule(site.o)
        if output.bias is None:
            output.bias = nn.Parameter(output.weight.new_zeros(output.weight.shape[0]), requires_grad=False)


def run(name: str, method: str, shares: Sequence[float], seed: int) -> dict[float, Cell]:
    """The cells of these shares from one run, which goes through all of them, or of one share alone."""
    chosen = load_model(name)
    model = copy.deepcopy(chosen.model)
    if METHODS[method].repair == "mean":
        add_biases(model)
    before = flops(model, all_sites(model)).units_total
    options = {"criterion": f"random(seed={seed})"} if method == "random" else {}
    started = time.perf_counter()
    cells: dict[float, Cell] = {}

    def note(label: str = "") -> None:
        left = flops(model, all_sites(model)).units_total / before
        cells[max(share for share in shares if share not in cells)] = {
            "metric": metric_of(name).name,
            "value": quality(model, chosen),
            "dense": dense_quality(name),
            "left": left,
            "seconds": round(time.perf_counter() - started, 1),
        }

    headprune.prune(
        model,
        chosen.calibration(seed),
        method=method,
        keep_flops=tuple(total_share(model, share) for share in shares),
        metric=metric_of(name).name,
        evaluation=chosen.evaluation[:1],  # the results are evaluated in full, each once
        at_point=note,
        **options,
    )
    if len(shares) == 1:
        note()
    return cells


def runs(wanted: Sequence[Any], done: Collection[Any]) -> Iterator[tuple[str, str, list[float], int]]:
    """What is left to do: a method of several rounds goes through all shares in one run, others start anew for each."""
    left = [cell for cell in wanted if cell not in done]
    while left:
        name, method, _, seed = left[0]
        alike = [p for p in left if (p[0], p[1], p[3]) == (name, method, seed)]
        together = alike if METHODS[method].rounds > 1 else left[:1]
        yield name, method, sorted((p[2] for p in together), reverse=True), seed
        left = [cell for cell in left if cell not in together]


def key(cell: Cell) -> tuple[Any, ...]:
    return tuple(cell[name] for name in KEY)


def read(path: Path) -> list[Cell]:
    return list(json.loads(path.read_text(encoding="utf-8"))["cells"]) if path.is_file() else []


def write(path: Path, cells: Sequence[Cell]) -> None:
    """Another file first, so that being stopped while writing loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps({"cells": list(cells)}, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def tables(cells: Sequence[Cell]) -> str:
    """For every model the mean over the seeds, with the difference to ours in brackets; the best are bold."""
    lines: list[str] = []
    good = [cell for cell in cells if "error" not in cell]
    for name in dict.fromkeys(cell["model"] for cell in good):
        rows = [cell for cell in good if cell["model"] == name]
        shares = sorted({cell["share"] for cell in rows}, reverse=True)
        metric = METRICS[rows[0]["metric"]]
        means: dict[tuple[str, float], float] = {}
        counts: dict[tuple[str, float], int] = {}
        for cell in rows:
            entry = cell["method"], cell["share"]
            same = [other["value"] for other in rows if (other["method"], other["share"]) == entry]
            means[entry], counts[entry] = statistics.mean(same), len(same)
        lines += [
            f"**{name}**: {metric.name}, dense {_text(metric, rows[0]['dense'])}, {max(counts.values())} seed(s)",
            "",
            "| method | " + " | ".join(f"{share:.0%} of FLOPs" for share in shares) + " |",
            "|---" * (len(shares) + 1) + "|",
        ]
        for method in [name for name in METHODS if any(entry[0] == name for entry in means)]:
            row = [_entry(metric, means, counts, method, share) for share in shares]
            lines.append(f"| {method} | " + " | ".join(row) + " |")
        lines.append("")
    failed = [cell for cell in cells if "error" in cell]
    lines += [f"- {' '.join(map(str, key(cell)))} failed: {cell['error']}" for cell in failed]
    return "\n".join(lines) + "\n"


def _entry(metric: Metric, means: Any, counts: Any, method: str, share: float) -> str:
    if (method, share) not in means:
        return "-"
    value = means[method, share]
    there = [other for (_, at), other in means.items() if at == share]
    best = max(there) if metric.higher_is_better else min(there)
    text = f"**{_text(metric, value)}**" if value == best else _text(metric, value)
    if method != OURS and (OURS, share) in means:
        margin = value - means[OURS, share]
        text += f" ({margin:+.2f})" if metric.name == "perplexity" else f" ({100 * margin:+.1f})"
    most = max(count for (_, at), count in counts.items() if at == share)
    return text if counts[method, share] == most else f"{text}, {counts[method, share]} seed(s)"


def _text(metric: Metric, value: float) -> str:
    return f"{value:.2f}" if metric.name == "perplexity" else f"{value:.1%}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budgets", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", help="names with commas between them; all that can be had by default")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="of the FLOPs of heads and neurons")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--long", action="store_true", help="SmolLM2-135M too, where it is installed")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    console = Console(stderr=True, highlight=False, markup=False)
    try:
        methods = [method_named(name).name for name in split_names(options.methods)]
    except headprune.HeadpruneError as error:
        parser.error(str(error))
    shares, seeds = (
        [kind(part) for part in value.split(",")] for kind, value in ((float, options.shares), (int, options.seeds))
    )
    usable = available(long=options.long)
    names = split_names(options.models) if options.models else usable
    missing = [name for name in names if name not in usable]
    if missing or not names:
        parser.error(
            f"{', '.join(missing) or 'no model'} cannot be had here; there are: {', '.join(usable) or 'none'}."
        )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    cells = [cell for cell in read(options.out) if "error" not in cell]
    done = {key(cell) for cell in cells}
    wanted = [(name, method, share, seed) for seed in seeds for name in names for share in shares for method in methods]
    for name, method, together, seed in runs(wanted, done):
        keys = [(name, method, share, seed) for share in together]
        try:
            results = run(name, method, together, seed)
        except Exception as error:  # whatever one run runs into, the others shall be run
            results = {share: {"error": f"{type(error).__name__}: {error}"} for share in together}
        for entry in keys:
            cell: Cell = {**dict(zip(KEY, entry, strict=True)), **results[entry[2]]}
            outcome = f"failed: {cell['error']}" if "error" in cell else f"{cell['value']:.4g} in {cell['seconds']} s"
            console.print(f"{' '.join(map(str, entry))}: {outcome}")
            cells.append(cell)
        write(options.out, cells)
    # The cells of this command; the file may hold more.
    text = tables([cell for cell in cells if key(cell) in set(wanted)])
    options.out.with_suffix(".md").write_text(tables(cells), encoding="utf-8")
    sys.stdout.write(text)
    return int(any("error" in cell for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
