"""Kills of Ray workers: a study in which every step of every run is killed once, against the same one left alone.

    python -m benchmarks.ray_kills MODEL --data FILE --every 4 --out DIR

Each worker dies by SIGKILL at a random moment of a write to its journal: before, in the midst of or after the line, or
between the journal and its times. Says how many died, and whether all files that do not tell the time are the same.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import headprune

PLUGIN = '''
import os, random, signal
from pathlib import Path
from headprune.run_folder import Run

write, marks = Run.write_line, Path({marks!r})
MOMENTS = ("before", "torn", "after", "between")

def due(run, moment):
    """Whether the process is to die now: once per run and step, at a moment that the seed draws."""
    place = f"{{run.path.parent.parent.name}}-{{run.path.name}}-{{len(run.steps)}}"
    if moment != random.Random(f"{{place}}-{seed}").choice(MOMENTS):
        return False
    try:
        os.close(os.open(marks / place, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def append(self, name, line):
    journal = name == "steps.jsonl"
    if due(self, "before" if journal else "between"):
        os.kill(os.getpid(), signal.SIGKILL)
    if journal and due(self, "torn"):
        with (self.path / name).open("a") as stream:
            stream.write(line[: len(line) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, name, line)
    if journal and due(self, "after"):
        os.kill(os.getpid(), signal.SIGKILL)

Run.write_line = append
'''
SAME = ("steps.jsonl", "curve.csv", "model/model.safetensors", "model/config.json", "comparison.json")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--criteria", default="magnitude,random")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--every", default="4")
    parser.add_argument("--workers", default="2")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    shutil.rmtree(options.out, ignore_errors=True)
    marks = options.out.resolve() / "marks"
    marks.mkdir(parents=True)
    plugin = options.out / "kills.py"
    command = [sys.executable, "-m", "headprune", "compare", options.model, "--data", options.data]
    command += ["--criteria", options.criteria, "--seeds", options.seeds, "--every", options.every, "--cpus", "1"]
    subprocess.run([*command, "--out", str(options.out / "alone")], check=True)
    # The command's own process imports it too, and only reads journals.
    plugin.write_text(PLUGIN.format(marks=str(marks), seed=options.seed))
    on_ray = ["--on", "ray", "--workers", options.workers, "--plugin", str(plugin)]
    subprocess.run([*command, "--out", str(options.out / "killed"), *on_ray], check=True)
    files = [file for name in SAME for file in (options.out / "alone").rglob(name)]
    other = [
        file
        for file in files
        if file.read_bytes() != (options.out / "killed" / file.relative_to(options.out / "alone")).read_bytes()
    ]
    died = len(list(marks.iterdir()))
    print(f"headprune {headprune.__version__}: {died} workers killed, {len(files)} files, {len(other)} of them differ")
    return 1 if other or not died else 0


if __name__ == "__main__":
    sys.exit(main())
