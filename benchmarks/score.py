"""One Gnorm step with accuracy, against other ways to get it, and how its cost grows.

    python -m benchmarks.score [--out FILE.json] [--quick]

Times are medians of interleaved repetitions in one process with two threads, shown as ratios: the machine may be
noisy, but it is so for both sides. Peak memory is the growth of the resident set in a fresh process for each side.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

import headprune
from benchmarks.published_procedure import notebook_accuracy, notebook_scores, one_by_one
from benchmarks.timing import interleaved

Batch = dict[str, torch.Tensor]
THREADS, SAMPLES, BATCH = 2, 128, 32


def bert(width: int = 768, layers: int = 12, heads: int = 12) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        num_labels=3,
        max_position_embeddings=512,
    )
    return transformers.BertForSequenceClassification(config).eval()


def data(
    samples: int = SAMPLES, longest: int = 64, shortest: int = 8, batch: int = BATCH, *, bucketed: bool = True
) -> list[Batch]:
    """Sentences of mixed length, bucketed by length as headprune's reader does, or as they come."""
    generator = random.Random(0)
    lengths = sorted(generator.randint(shortest, longest) for _ in range(samples))
    lengths[-1] = longest
    if not bucketed:
        generator.shuffle(lengths)
    torch.manual_seed(1)
    batches = []
    for start in range(0, samples, batch):
        part = torch.tensor(lengths[start : start + batch])
        mask = (torch.arange(int(part.max()))[None] < part[:, None]).long()
        batches.append(
            {
                "input_ids": torch.randint(1000, 30000, mask.shape) * mask,
                "attention_mask": mask,
                "labels": torch.randint(0, 3, (len(part),)),
            }
        )
    return batches


def forward(model: Any, batches: Sequence[Batch]) -> None:
    with torch.no_grad():
        for batch in batches:
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])


def step(model: Any, batches: Sequence[Batch]) -> None:
    """What is measured: scores of all heads and the accuracy of the model, from one pass."""
    result = headprune.score(model, batches, criterion="gnorm")
    assert result.accuracy is not None


def autograd_loop(model: Any, samples: Sequence[Batch]) -> None:
    """The obvious way: backward and weight gradients, one sample after the other."""
    layers = [layer.attention.self for layer in model.base_model.encoder.layer]
    weights = [getattr(layer, name).weight for layer in layers for name in ("query", "key", "value")]
    heads = model.config.num_attention_heads
    totals = torch.zeros(len(weights), heads)
    for sample in samples:
        model.zero_grad()
        model(input_ids=sample["input_ids"], attention_mask=sample["attention_mask"]).logits.norm().backward()
        for row, weight in enumerate(weights):
            totals[row] += weight.grad.unflatten(0, (heads, -1)).flatten(1).norm(dim=1)
    model.zero_grad()


def lean_autograd_loop(model: Any, samples: Sequence[Batch]) -> None:
    """The same for the q, k and v weights alone, all other parameters frozen."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    layers = [layer.attention.self for layer in model.base_model.encoder.layer]
    weights = [getattr(layer, name).weight for layer in layers for name in ("query", "key", "value")]
    for weight in weights:
        weight.requires_grad_(True)
    heads = model.config.num_attention_heads
    totals = torch.zeros(len(weights), heads)
    for sample in samples:
        logits = model(input_ids=sample["input_ids"], attention_mask=sample["attention_mask"]).logits
        for row, gradient in enumerate(torch.autograd.grad(logits.norm(), weights)):
            totals[row] += gradient.unflatten(0, (heads, -1)).flatten(1).norm(dim=1)
    for parameter in model.parameters():
        parameter.requires_grad_(True)


def speed(quick: bool) -> list[dict[str, Any]]:
    rows = []
    repeats = 1 if quick else 5
    model, batches = bert(), data()
    samples = one_by_one(batches)
    as_they_come = data(bucketed=False)  # the notebooks do not sort by length
    step(model, batches), forward(model, batches)  # warm-up
    ours, bare = interleaved(max(3, repeats), lambda: step(model, batches), lambda: forward(model, batches))
    rows.append(_row("time of a bare batched forward", ours / bare, "<= 2.0", ours / bare <= 2.0, "2.0"))
    # The notebooks run one whole pass per layer, each as long as the others: two of the twelve are timed and scaled.
    measured = [0, 6]
    layers = model.config.num_hidden_layers
    ours, passes, evaluation = interleaved(
        1 if quick else 3,
        lambda: step(model, batches),
        lambda: notebook_scores(model, as_they_come, measured),
        lambda: notebook_accuracy(model, samples),
    )
    notebooks = passes / len(measured) * layers + evaluation
    rows.append(_row("speed of the notebooks' procedure", notebooks / ours, ">= 20", notebooks / ours >= 20, "30"))
    rows[-1]["note"] = (
        f"{len(measured)} of {layers} layer passes timed ({passes:.1f} s) and scaled, evaluation {evaluation:.1f} s"
    )
    ours, loop, lean = interleaved(
        1 if quick else 3,
        lambda: step(model, batches),
        lambda: autograd_loop(model, samples),
        lambda: lean_autograd_loop(model, samples),
    )
    rows.append(_row("speed of a per-sample autograd loop", loop / ours, ">= 2", loop / ours >= 2, "3"))
    rows[-1]["note"] = f"{lean / ours:.2f}x against a loop for the q, k and v weights alone"
    return rows


def _row(what: str, ratio: float, must: str, met: bool, goal: str) -> dict[str, Any]:
    return {"against": what, "ratio": round(ratio, 2), "must": must, "met": met, "goal": goal}


def memory() -> dict[str, Any]:
    """Peak resident memory above the loaded model, each side in a process of its own."""
    peaks = {}
    for side in ("step", "training"):
        command = [sys.executable, "-m", "benchmarks.score", "--peak", side]
        peaks[side] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    ratio = peaks["step"] / peaks["training"]
    row = _row("peak memory of an ordinary training step", ratio, "<= 0.7", ratio <= 0.7, "0.5")
    return {**row, "note": f"{peaks['step']:.0f} MB against {peaks['training']:.0f} MB, the model's weights included"}


def print_peak(side: str) -> None:
    """Peak memory of one batch in MB: the largest resident set, less what the process had before the model."""

    def peak() -> float:
        # Not getrusage: a child starts with its parent's peak there.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    batches = data()[-1:]
    before = peak()
    model = bert()
    if side == "step":
        step(model, batches)
    else:
        model.train()
        model(**batches[0]).loss.backward()
    print(peak() - before)


def growth(quick: bool) -> list[dict[str, Any]]:
    """Seconds per step over layers, samples and sequence length, and the slope in doublings."""
    rows = []
    repeats = 1 if quick else 3

    def measure(what: str, settings: Sequence[int], make: Callable[[int], tuple[Any, list[Batch]]]) -> None:
        cases = [make(setting) for setting in settings]
        for model, batches in cases:
            step(model, batches)
        sides = [lambda m=model, b=batches: step(m, b) for model, batches in cases]
        times = interleaved(repeats, *sides)
        ratios = [round(later / first, 2) for first, later in pairwise(times)]
        grew = [round(b / a, 2) for a, b in pairwise(settings)]
        rows.append({"over": what, "at": list(settings), "grows by": ratios, "while it grows by": grew})

    few = data(samples=32)
    measure("layers", (6, 12, 24), lambda layers: (bert(width=384, layers=layers), few))
    model = bert(width=384, layers=6)
    measure("samples", (64, 128, 256), lambda samples: (model, data(samples=samples)))
    measure(
        "sequence length",
        (32, 64, 128, 256, 512),
        lambda length: (model, data(samples=8, longest=length, shortest=length, batch=8)),
    )
    return rows


def report(result: Mapping[str, Any], console: Console) -> None:
    table = Table(title="One Gnorm step with accuracy (BERT-base size, 128 samples up to 64 tokens, 2 threads)")
    for heading in ("against the", "ratio", "must be", "goal", "met"):
        table.add_column(heading)
    for row in result["ratios"]:
        table.add_row(row["against"], f"{row['ratio']}x", row["must"], row["goal"], "yes" if row["met"] else "NO")
    console.print(table)
    for row in result["ratios"]:
        if "note" in row:
            console.print(f"{row['against']}: {row['note']}", highlight=False)
    for row in result["growth"]:
        console.print(
            f"over {row['over']} {row['at']}: time grows by {row['grows by']}, the setting by "
            f"{row['while it grows by']}",
            highlight=False,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/score.json"))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--peak", choices=("step", "training"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    if options.peak:
        print_peak(options.peak)
        return 0
    ratios = [*speed(options.quick), memory()]
    result = {"threads": THREADS, "ratios": ratios, "growth": growth(options.quick)}
    report(result, Console())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"Written to {options.out}.")
    return 0 if all(row["met"] for row in ratios) else 1


if __name__ == "__main__":
    sys.exit(main())
