"""What a save may remove from a folder: files that an earlier save wrote there, as its headprune.json proves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from headprune.checkpoint import fingerprint
from headprune.errors import CheckpointError

ADAPTER = "adapter_config.json"  # transformers loads what it names instead of the model beside it
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.bin.index.json")
# Names under which `load` and transformers look for the weights of a model, so that none of another may stay.
MODEL_WEIGHTS = (
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"),
    *("quantized.safetensors", "model.quantized*.safetensors", "model.safetensors.index.quantized.json"),
    *("pytorch_model*.bin", "pytorch_model*.bin.index.json"),
)
SHOWN = 3  # names in a message


def removable_files(folder: Path, outdated: Sequence[str], *, overwrite: bool) -> set[str]:
    """The names of files that a save into this folder removes: weights of an earlier save, and those of its other files
    that match `outdated`. With `overwrite` also weights that were written or changed by others, where the new ones
    would not be found beside them. A folder with anything else in place of a checkpoint is refused."""
    unchanged, others = fingerprint.unchanged_files(folder)
    if not _is_model_config(folder / "config.json"):
        raise CheckpointError(f"{folder} exists and holds something that is not a checkpoint; choose a new directory.")
    if (folder / ADAPTER).is_file():
        raise CheckpointError(
            f"{folder} holds an adapter ({ADAPTER}), which transformers would load in place of the model; choose "
            "another directory."
        )
    foreign = sorted({"config.json", *_matching(folder, WEIGHTS)} - unchanged)
    if foreign and not overwrite:
        names = ", ".join(foreign[:SHOWN]) + (" and others" if len(foreign) > SHOWN else "")
        raise CheckpointError(
            f"{folder} has files that headprune.save did not write, or that have changed since ({names}); choose "
            "another directory, or pass overwrite=True to replace the model there."
        )
    ours = unchanged | (others & {*_matching(folder, (*MODEL_WEIGHTS, *outdated))})
    return ours | set(_matching(folder, MODEL_WEIGHTS)) if overwrite else ours


def _matching(folder: Path, patterns: Iterable[str]) -> list[str]:
    return [entry.name for entry in folder.iterdir() if any(entry.match(pattern) for pattern in patterns)]


def _is_model_config(file: Path) -> bool:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and "model_type" in settings
