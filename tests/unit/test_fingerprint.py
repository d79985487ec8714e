"""Fingerprints of models and data: what is hashed, and that weights are read once unless they change."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from headprune.checkpoint import fingerprint as module
from headprune.checkpoint.fingerprint import fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in (("config.json", b"{}"), ("model.safetensors", b"weights"), ("notes.txt", b"mine")):
        (folder / name).write_bytes(content)
    age(folder)
    return folder


def age(folder: Path, seconds: float = 60) -> None:
    """Let files be as old as those that somebody downloaded."""
    for file in folder.iterdir():
        os.utime(file, (time.time() - seconds, time.time() - seconds))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are read."""
    names: list[str] = []
    really = Path.open

    def open_(self: Path, *how: Any, **more: Any) -> Any:
        names.append(self.name)
        return really(self, *how, **more)

    monkeypatch.setattr(Path, "open", open_)
    monkeypatch.setattr(module, "_DIGESTS", {})
    return names


def test_names_and_contents_of_weights_and_config_are_hashed(model: Path) -> None:
    """In the form that run.json of every version has."""
    content = b"model/model.safetensors" + b"weights" + b"model/config.json" + b"{}"
    assert fingerprint(model) == hashlib.sha256(content).hexdigest()[:32]
    assert fingerprint(model / "notes.txt") == hashlib.sha256(b"notes.txt" + b"mine").hexdigest()[:32]
    assert fingerprint(model / "nothing") is None


def test_files_are_read_once_until_they_change(model: Path, opened: list[str]) -> None:
    known = fingerprint(model)
    assert opened == ["model.safetensors", "config.json"]
    assert fingerprint(model) == known
    assert len(opened) == 2
    (model / "model.safetensors").write_bytes(b"WEIGHTS")  # of the same size
    opened.clear()
    assert fingerprint(model) != known
    assert opened == ["model.safetensors", "config.json"]


def test_a_file_that_was_just_written_is_read_again(model: Path, opened: list[str]) -> None:
    """Its time stamp may be too coarse to tell of another change."""
    file = model / "model.safetensors"
    file.write_bytes(b"fresh 1")
    stamp = file.stat().st_mtime_ns
    known = fingerprint(model)
    file.write_bytes(b"fresh 2")
    os.utime(file, ns=(stamp, stamp))
    assert fingerprint(model) != known


def test_a_checkpoint_that_was_moved_after_it_was_hashed_is_not_read_again(model: Path, opened: list[str]) -> None:
    """As one is that is saved beside its place and then put there."""
    module.write(model)
    age(model)
    module.verify(model)
    opened.clear()
    moved = model.rename(model.with_name("moved"))
    module.verify(moved)
    assert not {"model.safetensors", "config.json"} & set(opened)
