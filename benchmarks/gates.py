"""What a short training gives back: learned gates, and models that were pruned without training.

    python -m benchmarks.gates [--rows A,B] [--seeds 0,1,2] [--out F]

minilm-sst2, 2,000 training sentences drawn by the seed, 872 of dev to evaluate on, one epoch of recovery from the
labels and the dense model. Rows: gates (50 % of heads, learned in two epochs), heads (the default of `prune` down to
20 % of heads), flops-30 and flops-20 (heads and neurons, so much of the encoder's FLOPs left). Rows are written to the
file as they come, and those that it has already are not run again.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

import headprune
from benchmarks.benchmark_models import BATCH, available, minilm_sst2
from benchmarks.budgets import total_share
from headprune.data import Examples
from headprune.measure.costs import flops
from headprune.measure.evaluator import Evaluator
from headprune.measure.metrics import METRICS
from headprune.tasks import task_of
from headprune.training.config import TrainConfig
from headprune.training.fit import fit
from headprune.training.gate_callback import GateCallback
from headprune.training.gate_config import reaching_rate
from headprune.training.learned_gates import LearnedGates
from headprune.units import all_sites, resolve

SENTENCES = 2000
CALIBRATION = 256
SEEDS = (0, 1, 2)
OUT = Path("benchmarks/results/gates.json")
GATES = TrainConfig(epochs=2.0, learning_rate=5e-5)
# Chosen by the divergence from the dense model on test.tsv, for the rows of FLOPs.
RECOVERY = TrainConfig(epochs=1.0, learning_rate=1e-4, hidden=30.0)
# How far below the dense model each may be, in points of accuracy.
ALLOWED = {"gates": 1.0, "heads": 0.5, "flops-30": 0.0, "flops-20": 1.0}
Row = dict[str, Any]


def gates(model: PreTrainedModel, dense: PreTrainedModel, training: Examples, seed: int) -> dict[str, PreTrainedModel]:
    steps = -(-len(training) // GATES.batch_size) * GATES.epochs
    learned = LearnedGates(model, keep=0.5, rate=reaching_rate(steps, GATES.learning_rate))
    with tempfile.TemporaryDirectory() as folder:
        config = replace(GATES, validation=0.0, seed=seed)
        callbacks = [GateCallback(gates=learned)]
        fit(model, training, task=task_of(model), config=config, folder=folder, teacher=dense, callbacks=callbacks)
    learned.remove(verify=training.select([0, 1]).batches(2)[0])
    return {"gates": model}


def heads(model: PreTrainedModel, dense: PreTrainedModel, training: Examples, seed: int) -> dict[str, PreTrainedModel]:
    batches = training.sample(CALIBRATION, seed).batches(BATCH)
    headprune.prune(model, batches, keep=0.2, evaluation=batches[:1])
    return {"heads": model}


def budgets(
    model: PreTrainedModel, dense: PreTrainedModel, training: Examples, seed: int
) -> dict[str, PreTrainedModel]:
    """One run, through both points."""
    batches = training.sample(CALIBRATION, seed).batches(BATCH)
    shares = {"flops-30": 0.3, "flops-20": 0.2}
    models: dict[str, PreTrainedModel] = {}

    def keep(label: str) -> None:
        models[list(shares)[len(models)]] = copy.deepcopy(model)

    points = tuple(total_share(model, share) for share in shares.values())
    headprune.prune(model, batches, keep_flops=points, evaluation=batches[:1], at_point=keep)
    return models


# What makes which rows.
MAKERS = {gates: ("gates",), heads: ("heads",), budgets: ("flops-30", "flops-20")}


def accuracy(model: PreTrainedModel, batches: Sequence[Any]) -> float:
    return float(METRICS["accuracy"].of(Evaluator(batches, cache_bytes=0)(model, ())).value)


def run(make: Any, wanted: Sequence[str], seed: int, source: Any) -> list[Row]:
    """The rows that one pruning gives, each recovered."""
    model = copy.deepcopy(source.model)
    training = source.pool.sample(SENTENCES, seed)
    before = flops(model, all_sites(model)).units_total
    started = time.perf_counter()
    models = make(model, source.model, training, seed)
    pruning = round(time.perf_counter() - started, 1)
    rows = []
    for name in wanted:
        recovered, started = models[name], time.perf_counter()
        pruned = accuracy(recovered, source.evaluation)
        headprune.finetune(recovered, training, teacher=source.model, config=replace(RECOVERY, seed=seed))
        rows.append(
            {
                "row": name,
                "seed": seed,
                "pruned": pruned,
                "recovered": accuracy(recovered, source.evaluation),
                "heads": sum(site.size for site in resolve(recovered)),
                "flops": round(flops(recovered, all_sites(recovered)).units_total / before, 4),
                "seconds": {"pruning": pruning, "recovery": round(time.perf_counter() - started, 1)},
            }
        )
    return rows


def table(dense: float, rows: Sequence[Row]) -> str:
    lines = [
        f"minilm-sst2: accuracy on dev, dense {dense:.2%}; {SENTENCES:,} training sentences, one epoch of recovery.",
        "",
        "| what | heads | FLOPs of units | pruned | recovered | by seed | may be | |",
        "|---|---:|---:|---:|---:|---|---:|---|",
    ]
    for name in ALLOWED:
        entries = sorted((row for row in rows if row["row"] == name), key=lambda row: row["seed"])
        if not entries:
            continue
        pruned, recovered = (statistics.mean(row[key] for row in entries) for key in ("pruned", "recovered"))
        least = dense - ALLOWED[name] / 100
        each = " / ".join(f"{row['recovered']:.2%}" for row in entries)
        lines.append(
            f"| {name} | {entries[0]['heads']} | {entries[0]['flops']:.0%} | {pruned:.2%} | **{recovered:.2%}** "
            f"| {each} | {least:.2%} | {'met' if recovered >= least else 'MISSED'} |"
        )
    return "\n".join(lines) + "\n"


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gates", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default=",".join(ALLOWED))
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    names, seeds = options.rows.split(","), [int(seed) for seed in options.seeds.split(",")]
    unknown = [name for name in names if name not in ALLOWED]
    if unknown:
        parser.error(f"there is no row {unknown[0]}; there are: {', '.join(ALLOWED)}.")
    if "minilm-sst2" not in available():
        parser.error("minilm-sst2 is not available here.")
    console = Console(stderr=True, highlight=False, markup=False)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    source = minilm_sst2()
    settings = {"sentences": SENTENCES, "gates": GATES.settings(), "recovery": RECOVERY.settings()}
    kept = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {}
    rows: list[Row] = kept.get("rows", []) if kept.get("settings") == settings else []
    dense = accuracy(source.model, source.evaluation)
    done = {(row["row"], row["seed"]) for row in rows}
    for seed in seeds:
        for make, produced in MAKERS.items():
            wanted = [name for name in produced if name in names and (name, seed) not in done]
            for row in run(make, wanted, seed, source) if wanted else ():
                rows.append(row)
                console.print(f"{row['row']}, seed {seed}: {row['pruned']:.2%} -> {row['recovered']:.2%}")
            write(options.out, {"settings": settings, "dense": dense, "rows": rows})
    text = table(dense, rows)
    options.out.with_suffix(".md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
