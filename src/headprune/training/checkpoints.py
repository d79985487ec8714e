"""Checkpoints of a training: a kill at any moment leaves the last complete one to resume from."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from headprune.checkpoint.atomic_files import sync, write_bytes, write_text
from headprune.errors import TrainingError
from headprune.json_forms import differing, other_settings

PREFIX = "checkpoint-"
MARK = "whole.json"  # written last: a checkpoint without it, or with other files than it names, is not whole
WEIGHTS = "trained.safetensors"
START = "start.safetensors"
RECORD = "training.json"


def trained_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that training may change: parameters with gradients, tied ones once, and persistent buffers."""
    persistent = set(model.state_dict())
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    return {**parameters, **{name: value for name, value in model.named_buffers() if name in persistent}}


def write_state(model: nn.Module, file: Path) -> None:
    save_file({name: value.detach().cpu().contiguous() for name, value in trained_state(model).items()}, file)


def read_state(model: nn.Module, file: Path) -> None:
    """Copy the tensors of a file into the model, whose shapes may differ from those of its config."""
    current, saved = trained_state(model), load_file(file)
    wrong = sorted(set(current) ^ set(saved)) or [n for n, value in current.items() if value.shape != saved[n].shape]
    if wrong:
        raise TrainingError(f"{file} belongs to another model: {wrong[0]} differs; remove its folder to start again.")
    with torch.no_grad():
        for name, value in current.items():
            value.copy_(saved[name])


def mark_whole(folder: Path, about: Mapping[str, Any]) -> None:
    """Mark a checkpoint as complete, once all of its files are on the disk."""
    sync(folder)
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    write_text(folder / MARK, json.dumps({"files": sizes, **about}) + "\n")


def whole(folder: Path) -> dict[str, Any] | None:
    """The mark of a complete checkpoint; None for one that is not complete."""
    try:
        mark = json.loads((folder / MARK).read_text())
        complete = all((folder / name).stat().st_size == size for name, size in mark["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return mark if complete else None


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder by their steps, complete or not."""
    entries = {entry.name.removeprefix(PREFIX): entry for entry in folder.glob(f"{PREFIX}*") if entry.is_dir()}
    return dict(sorted((int(step), entry) for step, entry in entries.items() if step.isdigit()))


def share_random_state(folder: Path, processes: int) -> None:
    """Give every process a file of its random numbers under the name that transformers' Trainer reads. All processes
    draw the same, so where a checkpoint was written by more or fewer of them, the first one's state serves."""
    names = [f"rng_state_{rank}.pth" for rank in range(processes)] if processes > 1 else ["rng_state.pth"]
    written = [file for name in ("rng_state.pth", "rng_state_0.pth") if (file := folder / name).is_file()]
    for name in names if written else ():
        if not (folder / name).is_file():
            write_bytes(folder / name, written[0].read_bytes())


def last_whole(folder: Path) -> Path | None:
    complete = [path for path in checkpoints(folder).values() if whole(path) is not None]
    return complete[-1] if complete else None


def tidy(folder: Path, keep: Iterable[int]) -> None:
    """Delete all checkpoints but these. The mark goes first, so that a partly deleted one never counts as complete."""
    steps = set(keep)
    for step, path in checkpoints(folder).items():
        if step not in steps:
            (path / MARK).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def drop_unfinished(folder: Path) -> None:
    tidy(folder, [step for step, path in checkpoints(folder).items() if whole(path) is not None])


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Record the settings of the training that a folder belongs to, or refuse the folder of another training."""
    file = folder / RECORD
    expected = json.loads(json.dumps(dict(settings)))
    try:
        recorded = json.loads(file.read_text())
    except FileNotFoundError:
        write_text(file, json.dumps(expected, indent=2) + "\n")
        return
    except (ValueError, RecursionError):
        recorded = None
    if not isinstance(recorded, dict):
        raise TrainingError(f"{file} is damaged; use another folder.")
    different = differing(recorded, expected)
    if different:
        raise TrainingError(other_settings(folder, "training", different, recorded, expected, "or another folder"))


def weights_hash(model: nn.Module) -> str:
    """A hash of all weights, by which a resumed training knows that it has the model it began with."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in model.named_parameters():
        digest.update(f"{name} {list(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
