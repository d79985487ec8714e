"""A cache of measured layouts, in memory and on disk: one small file per model class, settings, versions and code."""

from __future__ import annotations

import functools
import gzip
import hashlib
import inspect
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import transformers

_memory: dict[Any, Any] = {}


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
    classes: Iterable[type] = (),
    to_json: Callable[[Any], Any] = _unchanged,
    from_json: Callable[[Any], Any] = _unchanged,
) -> Any:
    """The result of `make` for this class and these settings, from the cache where possible; None is not cached.

    `classes` are those of all modules of the model: where the code of one of them changes, `make` runs again. A class
    whose code is in no file, as in a notebook, is cached in memory only.
    """
    involved = {base for each in (kind, *classes) for base in each.__mro__ if base.__module__ != "builtins"}
    code = _code_of(involved)
    file = None if code is None else _file(kind, f"{settings} {code}")
    key = (kind, settings, frozenset(_functions(involved))) if file is None else (kind, file)
    if key not in _memory:
        value = None
        if file is not None:
            with suppress(KeyError, TypeError, ValueError, AttributeError):  # a file of another form is ignored
                stored = _read(file)
                value = None if stored is None else from_json(stored)
        if value is None:
            # In the inference_mode or no_grad of a caller there are no gradients to measure by.
            with torch.inference_mode(mode=False), torch.enable_grad():
                value = make()
            if value is None:
                return None
            if file is not None:
                _write(file, to_json(value))
        _memory[key] = value
    return _memory[key]


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
    versions = f"{_package_code()} {transformers.__version__} {torch.__version__}"
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


def _code_of(classes: Iterable[type]) -> str | None:
    """A fingerprint of the files that define these classes and their functions, which a program may have replaced; None
    where one is in no file."""
    files: set[str] = set()
    lines = set()
    for function in _functions(classes):
        files.add(function.__code__.co_filename)
        lines.add(f"{function.__module__}.{function.__qualname__}:{function.__code__.co_firstlineno}")
    try:
        files |= {inspect.getfile(each) for each in classes}
        contents = sorted(_file_code(file, (stat := os.stat(file)).st_mtime_ns, stat.st_size) for file in files)
    except (OSError, TypeError):
        return None
    return hashlib.sha256("\n".join([*contents, *sorted(lines)]).encode()).hexdigest()


def _functions(classes: Iterable[type]) -> Iterator[FunctionType]:
    """The functions of these classes, without decorators."""
    for each in classes:
        for value in vars(each).values():
            inner = inspect.unwrap(value) if callable(value) else value
            if isinstance(inner, FunctionType):
                yield inner


@functools.lru_cache(maxsize=4096)
def _file_code(file: str, changed: int, size: int) -> str:
    """The hash of a file that was last changed at this time, and has this size."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
