"""The most memory that a command of headprune has had: what is imported first does not count.

    python -m benchmarks.peak_memory REPORT.json prune MODEL ...

Memory is what the kernel says of this process (VmHWM), which is reset after the imports.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

# What a run imports on its way: the program, the model's class, and what writes the report.
IMPORTED = (
    *("headprune.cli.main", "headprune.runs.experiment", "headprune.search.pruner", "headprune.criteria.elimination"),
    *("transformers.models.llama.modeling_llama", "datasets", "altair", "jinja2"),
)


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    report, *command = sys.argv[1:]
    for name in IMPORTED:
        importlib.import_module(name)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is there now
    before = kilobytes("VmRSS")
    sys.argv = ["headprune", *command]
    from headprune.__main__ import main as run

    try:
        run()
    finally:
        Path(report).write_text(json.dumps({"imports": before * 1024, "peak": kilobytes("VmHWM") * 1024}))


if __name__ == "__main__":
    main()
