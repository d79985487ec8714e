"""Handing checkpoints to a process of its own, which loads them and compares: see programs/load_checkpoints.py; and
running code where headprune is not installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

import forked_python
import headprune
from helpers import outputs, pruned
from zoo import Entry

PROGRAM = Path(__file__).resolve().parent / "programs" / "load_checkpoints.py"


def write_case(folder: Path, entry: Entry, variant: str, **options: Any) -> None:
    write_model(folder, pruned(entry, variant)[0], entry.batch(4), **options)


def write_model(folder: Path, model: Any, batch: dict[str, Any], **options: Any) -> None:
    """A checkpoint, with a batch, what the model said about it, and the shapes of its parameters."""
    headprune.save(model, folder / "checkpoint" / folder.name, **options)
    save_file({name: value.contiguous() for name, value in batch.items()}, folder / "batch.safetensors")
    actual = {name: value.contiguous() for name, value in outputs(model, batch).items()}
    save_file(actual, folder / "outputs.safetensors")
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    (folder / "shapes.json").write_text(json.dumps(shapes))


def load_all(folder: Path) -> dict[str, dict[str, list[str]]]:
    """kind -> case -> what was wrong with it; portable ones are loaded where headprune cannot be imported."""
    done = forked_python.run(PROGRAM, folder, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "headprune":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
"""


def without_headprune(code: str, *arguments: str | Path, folder: Path | None = None) -> str:
    """What a program prints that is run where headprune cannot be imported, and nothing can be fetched."""
    done = forked_python.run("-c", WITHOUT + code, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
