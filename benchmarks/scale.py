"""How time and memory grow with the model and the data, as ratios in one run, and whether the plan is right.

    python -m benchmarks.scale                growth of time with layers, samples, length and heads
    python -m benchmarks.scale --peaks        measured peaks of memory at four sizes, against `inspect --plan`
    python -m benchmarks.scale --depth        peaks at half, once and twice the depth
    [--schedules greedy,one-shot,rounds,layerwise] [--sizes 0,1,2,3] [--returning] [--out FILE.json]

Time is CPU time of one thread, the sizes taking turns. Peaks are those of real commands on random Llamas in bfloat16 on
disk, in a process each; a schedule that this version does not have is left out. With --returning the allocator gives
back what is freed at once, so that the peak is what was in use. Rows are written to the file as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from rich.console import Console
from rich.table import Table

import headprune
from benchmarks.synthetic_text import sentences, tokenizer
from headprune.checkpoint.save_load import load_structure
from headprune.search.forecast import Calibration, forecast
from headprune.search.pruner import Pruner

OUT = Path("benchmarks/results/scale.json")
VOCABULARY = 8000
# width, layers, neurons, heads: from 19 to 252 million parameters
SIZES = ((384, 8, 1024, 6), (640, 10, 1728, 10), (896, 12, 2432, 14), (1152, 16, 3072, 18))
DEPTH = (512, 8, 1408, 8)
DATA = Calibration(16, 64, 8, 16)
# Options of each schedule: few steps, as every step needs as much memory.
OPTIONS = {
    "greedy": ("--keep", "0.97"),
    "one-shot": ("--schedule", "one-shot", "--keep", "0.97"),
    "rounds": ("--keep-parameters", "0.85", "--rounds", "2"),
    "layerwise": ("--schedule", "layerwise", "--keep-parameters", "0.7"),
}


# --- growth ---

SMALL = {"layers": 3, "samples": 16, "length": 32, "heads": 4}
TURNS = 3


def small_llama(layers: int, heads: int) -> Any:
    """Heads are as wide however many there are, and the stream stays as it is."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        head_dim=32,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
    )
    return transformers.LlamaForCausalLM(config).eval()


def batches_of(samples: int, length: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(5, 512, (8, length), generator=generator), "attention_mask": torch.ones(8, length)}
        for _ in range(samples // 8)
    ]


def score_pass(model: Any, batches: list[dict[str, torch.Tensor]]) -> Callable[[], Any]:
    return lambda: headprune.score(model, batches)


def greedy_step(model: Any, batches: list[dict[str, torch.Tensor]]) -> Callable[[], Any]:
    """Steps of one run: score, remove, repair, evaluate. A head less or two do not count."""
    pruner = Pruner(model, batches, evaluation=batches)
    next(pruner)
    return lambda: next(pruner)


WORK = {"score pass": score_pass, "greedy step": greedy_step}


def growth() -> Iterator[dict[str, Any]]:
    """Of every size: its time by that of half of it, and by what twice the work would take."""
    torch.set_num_threads(1)
    for work, make in WORK.items():
        for axis, start in SMALL.items():
            sizes = [start, 2 * start, 4 * start]
            runs = []
            for size in sizes:
                shape = {**SMALL, axis: size}
                model = small_llama(shape["layers"], shape["heads"])
                runs.append(make(model, batches_of(shape["samples"], shape["length"])))
            times: list[list[float]] = [[] for _ in sizes]
            for turn in range(TURNS + 1):
                for seconds, once in zip(times, runs, strict=True):
                    started = time.process_time()
                    once()
                    if turn:  # the first warms up
                        seconds.append(time.process_time() - started)
            medians = [statistics.median(seconds) for seconds in times]
            for number in (1, 2):
                ratio = medians[number] / medians[number - 1]
                row = {"work": work, "of": axis, "from": sizes[number - 1], "to": sizes[number]}
                yield {**row, "ratio": round(ratio, 3), "to linear": round(ratio / 2, 3)}


# --- peaks ---


def make_model(folder: Path, shape: tuple[int, int, int, int]) -> Path:
    """A random Llama of this shape with a tokenizer, on disk, and texts for it."""
    width, layers, neurons, heads = shape
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        intermediate_size=neurons,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=512,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    words = VOCABULARY - 5
    tokenizer(words).save_pretrained(folder)
    length = DATA.length
    texts = sentences(2 * DATA.samples, 0, words=words, shortest=length, longest=length)
    (folder.parent / "texts.txt").write_text("\n".join(texts) + "\n")
    return folder


def run_peak(model: Path, schedule: str, folder: Path, returning: bool) -> dict[str, int] | str:
    """Bytes after the imports and at the peak of a run, or why there was none."""
    report, out = folder / "peak_memory.json", folder / f"run-{schedule}"
    data = ["--data", str(model.parent / "texts.txt"), "--max-length", str(DATA.length)]
    counts = ["--calibration-samples", str(DATA.samples), "--evaluation-samples", str(DATA.evaluation)]
    options = [*data, *counts, "--batch-size", str(DATA.batch_size), *OPTIONS[schedule], "--out", str(out)]
    words = [sys.executable, "-m", "benchmarks.peak_memory", str(report), "prune", str(model), *options]
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536"} if returning else {}
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **allocator})
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
    return json.loads(report.read_text())


def peak_rows(shape: tuple[int, int, int, int], schedules: Sequence[str], returning: bool) -> Iterator[dict[str, Any]]:
    """What was planned and what was measured above the imports, schedule after schedule."""
    with tempfile.TemporaryDirectory(prefix="headprune-scale-") as temporary:
        folder = Path(temporary)
        model = make_model(folder / "model", shape)
        structure = load_structure(model)
        needs = {need.schedule: need for need in forecast(structure, DATA)}
        parameters = structure.num_parameters()
        for schedule in schedules:
            peaks = run_peak(model, schedule, folder, returning)
            row: dict[str, Any] = {"schedule": schedule, "parameters": parameters, "layers": shape[1]}
            row["allocator"] = "returning" if returning else "usual"
            if isinstance(peaks, str):
                yield {**row, "left out": peaks}
                continue
            planned, taken = (size - peaks["imports"] for size in (needs[schedule].memory, peaks["peak"]))
            sizes = {"planned MB": round(planned / 1e6), "measured MB": round(taken / 1e6)}
            phase = {"phase": needs[schedule].phase, "imports MB": round(peaks["imports"] / 1e6)}
            yield {**row, **sizes, "measured by planned": round(taken / planned, 3), **phase}


def by_once(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same model at half, once and twice its depth: each peak by that at once, where that is known."""

    def key(row: dict[str, Any]) -> tuple[str, str]:
        return row["schedule"], row["allocator"]

    once = {key(row): row.get("measured MB") for row in rows if row["layers"] == DEPTH[1]}
    return [
        {**row, "by once": round(row["measured MB"] / once[key(row)], 3)}
        if row.get("measured MB") and once.get(key(row))
        else row
        for row in rows
    ]


# --- the program ---


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(title=title, title_justify="left")
    for heading in dict.fromkeys(name for row in rows for name in row):
        table.add_column(heading)
    for row in rows:
        table.add_row(*(str(row.get(column.header, "")) for column in table.columns))
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peaks", action="store_true")
    parser.add_argument("--depth", action="store_true")
    parser.add_argument("--schedules", default=",".join(OPTIONS))
    parser.add_argument("--sizes", default="0,1,2,3")
    parser.add_argument("--returning", action="store_true", help="with an allocator that gives back at once")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    transformers.utils.logging.disable_progress_bar()
    schedules = options.schedules.split(",")
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}

    def write(section: str, rows: list[dict[str, Any]]) -> None:
        results[section] = rows
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=2) + "\n")

    width, layers, neurons, heads = DEPTH
    shapes_of = {
        "peaks": [SIZES[int(size)] for size in options.sizes.split(",")] if options.peaks else [],
        "depth": [(width, depth, neurons, heads) for depth in (layers // 2, layers, 2 * layers)]
        if options.depth
        else [],
    }
    for section, shapes in shapes_of.items():
        for row in (row for shape in shapes for row in peak_rows(shape, schedules, options.returning)):
            rows = merged(results.get(section, []), [row])
            write(section, by_once(rows) if section == "depth" else rows)
            show(section, [row])
    if not (options.peaks or options.depth):
        grown: list[dict[str, Any]] = []
        for row in growth():
            grown.append(row)
            write("growth", grown)
            show("growth", [row])
    for section, rows in results.items():
        show(section, rows)
    return 0


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of an earlier run stay where this one has not measured the same."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["schedule"], row["parameters"], row["allocator"]

    known = {key(row): row for row in [*old, *new]}
    return [known[name] for name in sorted(known)]


if __name__ == "__main__":
    sys.exit(main())
