"""A cache of measured layouts, in memory and on disk: one small file per model class, settings and versions."""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

_memory: dict[tuple[type, Path], Any] = {}


def folder() -> Path:
    """The folder of the cache: HEADPRUNE_CACHE, or headprune in the user's cache folder."""
    configured = os.environ.get("HEADPRUNE_CACHE")
    return (
        Path(configured) if configured else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headprune"
    )


def _unchanged(value: Any) -> Any:
    return value


def remembered(
    kind: type,
    settings: str,
    make: Callable[[], Any],
    *,
    to_json: Callable[[Any], Any] = _unchanged,
    from_json: Callable[[Any], Any] = _unchanged,
) -> Any:
    """The result of `make` for this class and these settings, from the cache where possible; None is not cached."""
    file = _file(kind, settings)
    if (kind, file) not in _memory:
        stored = _read(file)
        value = make() if stored is None else from_json(stored)
        if value is None:
            return None
        if stored is None:
            _write(file, to_json(value))
        _memory[kind, file] = value
    return _memory[kind, file]


def _read(file: Path) -> Any:
    with suppress(OSError, ValueError, EOFError, zlib.error):  # a broken file is ignored
        return json.loads(gzip.decompress(file.read_bytes()))
    return None


def _write(target: Path, value: Any) -> None:
    with suppress(OSError):  # without a writable folder, results are computed again
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as file:
            file.write(gzip.compress(json.dumps(value).encode(), mtime=0))
        Path(file.name).replace(target)


def _file(kind: type, settings: str) -> Path:
    name = f"{kind.__module__}.{kind.__qualname__}"
    versions = f"{_package_code()} {transformers.__version__} {torch.__version__} {_class_code(kind)}"
    digest = hashlib.sha256(f"{name} {versions} {settings}".encode()).hexdigest()[:24]
    return folder() / "proofs" / f"{kind.__name__}-{digest}.json.gz"


@functools.cache
def _package_code() -> str:
    """A fingerprint of the code of headprune: another version proves layouts again."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _class_code(kind: type) -> str:
    """A fingerprint of the file that defines the class, where there is one: users may edit it."""
    import inspect

    with suppress(OSError, TypeError):
        return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()[:16]
    return ""
