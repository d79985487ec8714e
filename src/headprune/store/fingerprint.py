"""A fingerprint of a checkpoint: sizes and hashes of its files, kept beside them in headprune.json."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import transformers

from headprune.errors import CheckpointError

NAME = "headprune.json"
FORMAT = 1


def write(folder: Path) -> None:
    from headprune import __version__

    record = {
        "format": FORMAT,
        "headprune": __version__,
        "transformers": transformers.__version__,
        "files": {file.name: _describe(file) for file in sorted(_covered(folder))},
    }
    (folder / NAME).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


def verify(folder: Path) -> None:
    """Raise if a file is not the one that was saved. A folder that headprune did not save has nothing to check."""
    if not (folder / NAME).is_file():
        return
    try:
        record = json.loads((folder / NAME).read_text())
        version = int(record["format"])
        files = {str(name): (int(known["bytes"]), str(known["sha256"])) for name, known in record["files"].items()}
        if not all(_is_plain_name(name) for name in files):
            raise ValueError("a name leads out of the folder")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{folder / NAME} is damaged; copy the checkpoint again.") from None
    if version > FORMAT:
        raise CheckpointError(f"{folder} was saved in format {version}, newer than this headprune reads; upgrade it.")
    for name, (size, digest) in files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; copy the checkpoint again.")
        if file.stat().st_size != size:
            raise CheckpointError(
                f"{file} has {file.stat().st_size} bytes, but {size} were saved: it is truncated or was "
                "replaced; copy the checkpoint again."
            )
        if _sha256(file) != digest:
            raise CheckpointError(
                f"{file} does not match the fingerprint in {NAME}: it was changed after saving; copy the checkpoint "
                f"again, or delete {NAME} to accept the change."
            )


def _is_plain_name(name: str) -> bool:
    """Whether this names a file of the folder itself, on every system: a record from elsewhere must not be able to ask
    for other files."""
    return name not in ("", ".", "..") and not any(mark in name for mark in ("/", "\\", ":", "\0"))


def _covered(folder: Path) -> list[Path]:
    return [folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]


def _describe(file: Path) -> dict[str, int | str]:
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()
