"""What a change of the code costs or saves: the core's main work in two source trees, by turns, in one run.

    python -m benchmarks.compare_source_trees OTHER_TREE [--only score-gnorm,greedy-every] [--repeats 3] [--out F]

OTHER_TREE is a checkout of the revision to compare with (`git worktree add ../before REVISION`). Every measurement is a
process of its own that uses public names alone, so that it runs in both trees; times are processor time of one thread,
memory is the peak of the process above what imports take. The least of the repeats counts; ratios are this tree by the
other one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parents[1]
OUT = HERE / "benchmarks" / "results" / "compare_source_trees.json"

START = """
import json, os, resource, sys, time
import torch
import transformers
import headprune
transformers.utils.logging.set_verbosity_error()
torch.set_num_threads(1)

HOME = os.path.dirname(headprune.__file__)
LAYERWISE = "sweep" if os.path.isdir(os.path.join(HOME, "search", "sweep")) else "layerwise"  # its former name

def bert(layers=6):
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=2000, hidden_size=384, num_hidden_layers=layers, num_attention_heads=12,
                                     intermediate_size=1536, num_labels=2)
    return transformers.BertForSequenceClassification(config).eval()

def texts(count, seed=0, size=32, length=64):
    generator = torch.Generator().manual_seed(seed)
    return [
        {"input_ids": torch.randint(5, 2000, (size, length), generator=generator),
         "attention_mask": torch.ones(size, length, dtype=torch.long),
         "labels": torch.randint(0, 2, (size,), generator=generator)}
        for _ in range(count)
    ]

def granite():
    torch.manual_seed(0)
    config = transformers.GraniteConfig(vocab_size=500, hidden_size=128, intermediate_size=256, num_hidden_layers=6,
                                        num_attention_heads=8, num_key_value_heads=4)
    return transformers.GraniteForCausalLM(config).eval()

def prune(**options):
    return headprune.prune(bert(), texts(4), evaluation=texts(8, seed=1), **options)
"""
# The last line of each is what is timed; lines before it are not.
WORK = {
    "score-gnorm": ("model, data = bert(), texts(4)", 'headprune.score(model, data, criterion="gnorm")'),
    "score-residual-gradient": (
        "model, data = bert(), texts(4)",
        'headprune.score(model, data, criterion="residual-gradient")',
    ),
    "score-elimination": (
        "model, data = bert(), texts(4)",
        'headprune.score(model, data, criterion="elimination", units="heads,neurons")',
    ),
    "score-hies": ("model, data = bert(), texts(4)", 'headprune.score(model, data, criterion="hies")'),
    "greedy-every": ("", 'prune(schedule="greedy", rescore="every", keep=60)'),
    "greedy-auto": ("", 'prune(schedule="greedy", rescore="auto", keep=36)'),
    "greedy-gnorm": ("", 'prune(schedule="greedy", criterion="gnorm", rescore="every", keep=64)'),
    "one-shot": ("", 'prune(schedule="one-shot", keep=60)'),
    "rounds": ("", "prune(keep_flops=0.6, rounds=3)"),
    "layerwise": ("", "prune(schedule=LAYERWISE, keep_flops=0.6)"),
    "remove": ("model = bert()", "headprune.remove(model, [(0, 1), (3, 2)])"),
    "load-discovered": (
        "model = granite(); headprune.remove(model, headprune.resolve(model)[0].units()[0]); "
        "headprune.save(model, FOLDER); os.environ['HEADPRUNE_CACHE'] = FOLDER + '-none'",
        "headprune.load(FOLDER)",
    ),
}
PROGRAM = """{start}
FOLDER = {folder!r}
{before}
first = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.process_time()
{work}
print(json.dumps({{"seconds": time.process_time() - started,
                   "peak_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - first) / 1024}}))
"""


def measure(tree: Path, name: str, folder: str) -> dict[str, float]:
    """One run of this work in a process that imports headprune from this tree."""
    before, work = WORK[name]
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "HEADPRUNE_CACHE": f"{folder}/proofs-{tree.name}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if name == "load-discovered":  # what is measured is a machine that has not seen the class
        setup = PROGRAM.format(start=START, folder=f"{folder}/{tree.name}", before="", work=before)
        _run(setup, environment)
        environment["HEADPRUNE_CACHE"] = tempfile.mkdtemp(dir=folder)
        before = ""
    return _run(PROGRAM.format(start=START, folder=f"{folder}/{tree.name}", before=before, work=work), environment)


def _run(program: str, environment: dict[str, str]) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"A measurement failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path)
    parser.add_argument("--only", default=",".join(WORK))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    trees = {"this": HERE, "other": options.other.resolve()}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only.split(","):
            runs: dict[str, list[dict[str, float]]] = {tree: [] for tree in trees}
            for _ in range(options.repeats):
                for tree, path in trees.items():
                    runs[tree].append(measure(path, name, folder))
            least = {
                (tree, what): min(run[what] for run in results)
                for tree, results in runs.items()
                for what in ("seconds", "peak_mb")
            }
            rows.append(
                {
                    "work": name,
                    **{f"{tree}_{what}": round(value, 3) for (tree, what), value in least.items()},
                    "time_ratio": round(least["this", "seconds"] / least["other", "seconds"], 3),
                    "memory_ratio": round(least["this", "peak_mb"] / max(least["other", "peak_mb"], 1.0), 3),
                }
            )
            Console(stderr=True).print(rows[-1])
    revisions = {
        name: subprocess.check_output(["git", "-C", tree, "rev-parse", "--short", "HEAD"], text=True).strip()
        for name, tree in trees.items()
    }
    options.out.write_text(
        json.dumps({"revisions": revisions, "repeats": options.repeats, "rows": rows}, indent=1) + "\n"
    )
    table = Table("work", "seconds before", "after", "ratio", "peak MB before", "after", "ratio")
    for row in rows:
        cells = ("other_seconds", "this_seconds", "time_ratio", "other_peak_mb", "this_peak_mb", "memory_ratio")
        table.add_row(row["work"], *(f"{row[cell]:.2f}" for cell in cells))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
