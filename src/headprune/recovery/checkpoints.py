"""Checkpoints of a training: written so that a kill at any moment leaves the last whole one to go on from."""

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

from headprune.errors import TrainingError
from headprune.store.files import sync, write_text

PREFIX = "checkpoint-"
MARK = "whole.json"  # written last: a checkpoint without it, or with other files than it names, is not whole
WEIGHTS = "trained.safetensors"
START = "start.safetensors"
RECORD = "training.json"


def trained_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What training may change: parameters with gradients, tied ones once, and buffers. All else is as it was."""
    kept = set(model.state_dict())
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    return {**parameters, **{name: value for name, value in model.named_buffers() if name in kept}}


def write_state(model: nn.Module, file: Path) -> None:
    save_file({name: value.detach().cpu().contiguous() for name, value in trained_state(model).items()}, file)


def read_state(model: nn.Module, file: Path) -> None:
    """Put the values of a file into the model as it is: its shapes are its own, whatever its config says."""
    own, found = trained_state(model), load_file(file)
    wrong = sorted(set(own) ^ set(found)) or [n for n, value in own.items() if value.shape != found[n].shape]
    if wrong:
        raise TrainingError(f"{file} belongs to another model: {wrong[0]} differs; remove its folder to start again.")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(found[name])


def mark_whole(folder: Path, about: Mapping[str, Any]) -> None:
    """Say that a checkpoint is complete, once all of it is on the disk."""
    sync(folder)
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    write_text(folder / MARK, json.dumps({"files": sizes, **about}) + "\n")


def whole(folder: Path) -> dict[str, Any] | None:
    """What was said of a checkpoint when it was complete; None for one that is not."""
    try:
        said = json.loads((folder / MARK).read_text())
        there = all((folder / name).stat().st_size == size for name, size in said["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return said if there else None


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints in a folder by their steps, whole or not."""
    found = {}
    for entry in folder.glob(f"{PREFIX}*"):
        number = entry.name.removeprefix(PREFIX)
        if entry.is_dir() and number.isdigit():
            found[int(number)] = entry
    return dict(sorted(found.items()))


def last_whole(folder: Path) -> Path | None:
    known = [path for path in checkpoints(folder).values() if whole(path) is not None]
    return known[-1] if known else None


def tidy(folder: Path, keep: Iterable[int]) -> None:
    """Delete all checkpoints but these; the mark goes first, so that half a checkpoint never looks whole."""
    kept = set(keep)
    for step, path in checkpoints(folder).items():
        if step not in kept:
            (path / MARK).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def drop_unfinished(folder: Path) -> None:
    tidy(folder, [step for step, path in checkpoints(folder).items() if whole(path) is not None])


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write down what a folder's checkpoints belong to, or refuse those of another training."""
    file = folder / RECORD
    wanted = json.loads(json.dumps(dict(settings)))
    try:
        known = json.loads(file.read_text())
    except FileNotFoundError:
        write_text(file, json.dumps(wanted, indent=2) + "\n")
        return
    except ValueError:
        known = None
    if known == wanted:
        return
    different = sorted(name for name in wanted if not isinstance(known, dict) or known.get(name) != wanted[name])
    raise TrainingError(
        f"{folder} holds the checkpoints of another training ({', '.join(different) or 'other settings'} differ); use "
        "the same settings, or another folder."
    )


def weights_hash(model: nn.Module) -> str:
    """A hash of all weights: whether a training goes on from the model that it began with."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in model.named_parameters():
        digest.update(f"{name} {list(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
