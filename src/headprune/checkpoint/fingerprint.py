"""Fingerprints: sizes and hashes of the files of a checkpoint, in its headprune.json; one hash each of the models and
data of a run.

headprune.json also lists all files that were written, so that a later save removes no others.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import transformers

from headprune.errors import CheckpointError
from headprune.json_forms import check_form

NAME = "headprune.json"
FORMAT = 1
SETTLED = 2_000_000_000  # nanoseconds after which a change gets another time stamp on every file system

States = tuple[tuple[str, int, int, int, int], ...]
_DIGESTS: dict[States, str] = {}  # of this process


def write(folder: Path) -> None:
    from headprune import __version__

    record = {
        "format": FORMAT,
        "headprune": __version__,
        "transformers": transformers.__version__,
        "files": {file.name: _describe(file) for file in sorted(_covered(folder))},
        "written": sorted({NAME, *(entry.name for entry in folder.iterdir())}),
    }
    (folder / NAME).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")


class _Record(NamedTuple):
    version: int
    files: dict[str, tuple[int, str]]  # name -> bytes and sha256
    written: list[str]


def _read(folder: Path) -> _Record:
    """The headprune.json of a folder; ValueError where it is damaged."""
    try:
        record = json.loads((folder / NAME).read_bytes())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_form(record, {"format": int, "files": {str: {"bytes": int, "sha256": str}}, "written?": [str]})
    files = {name: (entry["bytes"], entry["sha256"]) for name, entry in record["files"].items()}
    if not all(is_plain_name(name) for name in files):
        raise ValueError("a name leads out of the folder")
    # Earlier versions did not list what they wrote.
    return _Record(record["format"], files, record.get("written", [NAME, *files]))


def unchanged_files(folder: Path) -> tuple[set[str], set[str]]:
    """The files of a folder that were written with its headprune.json: those that it has fingerprints of, if they
    still match, and all others; both empty where there is none that can be read."""
    try:
        record = _read(folder)
    except (OSError, ValueError):
        return set(), set()
    covered = {
        name
        for name, (size, digest) in record.files.items()
        if (file := folder / name).is_file() and file.stat().st_size == size and _sha256(file) == digest
    }
    return covered, set(record.written) - record.files.keys()


def verify(folder: Path) -> None:
    """Raise if a file is not the one that was saved. A folder without headprune.json is not checked."""
    if not (folder / NAME).is_file():
        return
    try:
        version, files, _ = _read(folder)
    except ValueError:
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


def is_plain_name(name: str) -> bool:
    """Whether this names a file of the folder itself, on every system: a manipulated record must not reach other
    files."""
    return name not in ("", ".", "..") and not any(mark in name for mark in ("/", "\\", ":", "\0"))


def _covered(folder: Path) -> list[Path]:
    return [folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]


def _describe(file: Path) -> dict[str, int | str]:
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def _sha256(file: Path) -> str:
    return _digest([("", file)])


def fingerprint(source: str | Path) -> str | None:
    """A hash of a file, of the config and weights in a model's folder, or of all files in another folder; None for a
    path that does not exist here."""
    path = Path(source)
    if path.is_file():
        files = [path]
    else:
        weights = sorted(path.glob("*.safetensors"))
        files = [*weights, path / "config.json"] if weights else sorted(f for f in path.rglob("*") if f.is_file())
    return _digest([(str(file.relative_to(path.parent)), file) for file in files])[:32] if files else None


def _digest(files: Sequence[tuple[str, Path]]) -> str:
    """sha256 over names and contents, cached in the process: gigabytes of weights are read once, unless they change."""
    states = _states(files)
    if states in _DIGESTS:
        return _DIGESTS[states]
    digest = hashlib.sha256()
    for name, file in files:
        digest.update(name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    # A file that was just written may change once more without another time stamp.
    if states == _states(files) and time.time_ns() - max(state[-1] for state in states) > SETTLED:
        _DIGESTS[states] = digest.hexdigest()
    return digest.hexdigest()


def _states(files: Sequence[tuple[str, Path]]) -> States:
    """Equal for unchanged files, also after a move."""
    stats = [(name, file.stat()) for name, file in files]
    return tuple((name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
