"""What pruning buys where models are served: dense and pruned in one runtime, by turns in one process.

    python -m benchmarks.exports [--runtimes onnx,openvino] [--left 0.5] [--out F]

minilm-sst2 with so much of the encoder's FLOPs left (heads and neurons, 256 calibration sentences), in float32 and in
int8, on batches of 1 and 32 of dev's sentences of middle length, with one thread. Goal: in ONNX Runtime in float32,
half of the FLOPs gone makes both at least 1.6 times as fast.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

import headprune
from benchmarks.benchmark_models import SHARED, available, minilm_sst2
from benchmarks.budgets import total_share
from headprune.data import Examples, load_examples
from headprune.exports.export_model import export
from headprune.measure.costs import flops
from headprune.units import all_sites

CALIBRATION, ROWS = 256, 32
GOAL = 1.6
OUT = Path("benchmarks/results/exports.json")
MODEL, DATA = SHARED / "models" / "minilm-sst2", SHARED / "data" / "sst2" / "dev.tsv"


def pruned(model: PreTrainedModel, pool: Examples, left: float) -> PreTrainedModel:
    """A copy with this share of the encoder's FLOPs."""
    smaller = copy.deepcopy(model)
    batches = pool.sample(CALIBRATION, 0).batches(ROWS)
    headprune.prune(smaller, batches, keep_flops=total_share(model, left), evaluation=batches[:1])
    return smaller


def encoder_share(dense: PreTrainedModel, smaller: PreTrainedModel) -> float:
    before, after = (flops(model, all_sites(model)).units_total for model in (dense, smaller))
    return after / before


def row(name: str, quantize: str | None, smaller: Any, dense: Any, batches: Any) -> dict[str, Any]:
    """Quality on all sentences, and times on the batch of middle length and its first sentence."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        record = export(smaller, out, batches, to=name, quantize=quantize, dense=dense, max_drop=1.0)
    return {key: record[key] for key in ("runtime", "quantize", "versions", "check", "latency", "megabytes")}


def print_rows(rows: Sequence[dict[str, Any]], share: float) -> None:
    table = Table(title=f"{share:.1%} of the encoder's FLOPs left; times as fast as dense in float32", title_style="")
    for column in ("runtime", "weights", "batch of 1", "batch of 32", "accuracy [95%]", "MB"):
        table.add_column(column, justify="left" if column in ("runtime", "weights") else "right")
    for row in rows:
        metric, size = row["check"]["exported"], row["megabytes"]
        low, high = metric["interval"]
        table.add_row(
            row["runtime"],
            row["quantize"] or "float32",
            *(f"{row['latency'][f'batch_{number}']['speedup']:.2f}" for number in (1, ROWS)),
            f"{metric['value']:.2%} [{100 * low:.1f}, {100 * high:.1f}]",
            f"{size['dense']:.1f} -> {size['pruned']:.1f}",
        )
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runtimes", default="onnx,openvino")
    parser.add_argument("--left", type=float, default=0.5)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    if "minilm-sst2" not in available():
        return 2
    torch.set_num_threads(1)
    source = minilm_sst2()
    smaller = pruned(source.model, source.pool, options.left)
    share = encoder_share(source.model, smaller)
    batches = load_examples(source.model, DATA, processor=MODEL).batches(ROWS)
    rows = []
    for name in options.runtimes.split(","):
        for quantize in (None, "int8"):
            rows.append(row(name, quantize, smaller, source.model, batches))
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps({"left": share, "goal": GOAL, "rows": rows}, indent=2) + "\n")
    print_rows(rows, share)
    first = next((result for result in rows if result["runtime"] == "onnx" and result["quantize"] is None), None)
    if first is None:
        return 0
    slowest = min(first["latency"][f"batch_{number}"]["speedup"] for number in (1, ROWS))
    verdict = "met" if slowest >= GOAL else "MISSED"
    print(f"ONNX Runtime, float32: at least {slowest:.2f} times as fast; goal {GOAL}: {verdict}")
    return 0 if slowest >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
