"""Atomic writes of files and folders: a kill at any moment leaves the old or the new one."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from headprune.errors import CheckpointError, HeadpruneError

MAX_SHOWN = 80  # characters of a path that is too long to be shown as a whole
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux's renameat2: two names swap their directories in one step
_AT_FDCWD = -100  # paths are relative to the working directory


def path_exists(path: str | Path, error: type[HeadpruneError]) -> bool:
    """Whether a file or folder of this name exists; a name that the system cannot look up is refused."""
    try:
        return Path(path).exists()
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or str(failure)
        raise error(f"{short(path)} cannot be looked up ({reason}); give a shorter or another path.") from None


def short(path: str | Path) -> str:
    """A path, shortened for messages."""
    text = str(path)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


@contextmanager
def replace_directory(target: Path, removable: Callable[[Path], Collection[str]]) -> Iterator[Path]:
    """A new directory to fill; when the block ends without an error, it becomes `target` in one step.

    `removable` gives the names of the files in an existing directory that may go, and raises where it must not be
    replaced. All others that were not written again (notes, a model card) are kept.
    """
    path_exists(target, CheckpointError)
    target = target.resolve()  # a symbolic link stays, and its target is replaced
    if target.is_file():
        raise CheckpointError(f"{target} is a file; choose a directory to save to.")
    if target == Path.cwd():
        raise CheckpointError(f"{target} is the working directory, which cannot be replaced; name a directory in it.")
    recover_directory(target)
    removed = removable(target) if target.is_dir() and any(target.iterdir()) else ()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.new-", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"Cannot write to {target.parent}: {error.strerror}; choose another directory.") from None
    try:
        fresh.chmod(0o777 & ~umask())
        yield fresh
        if target.is_dir():
            _keep_other_files(target, fresh, removed)
        sync(fresh)
        _swap(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old text or the new."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o666 & ~umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def recover_directory(target: Path) -> None:
    """Finish a `_swap` that was killed between its two renames."""
    target = target.resolve()
    backup = _backup_path(target)
    if target.name and backup.is_dir():
        if target.exists():
            shutil.rmtree(backup)
        else:
            backup.rename(target)


def _backup_path(target: Path) -> Path:
    return target.parent / f".{target.name}.old"


def _swap(fresh: Path, target: Path) -> None:
    if not target.exists():
        fresh.rename(target)
    elif _exchange(fresh, target):
        shutil.rmtree(fresh)
    else:
        target.rename(_backup_path(target))
        fresh.rename(target)
        shutil.rmtree(_backup_path(target))


def _exchange(one: Path, other: Path) -> bool:
    """Swap two directories atomically where the system can (Linux); False where it cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0


def _keep_other_files(old: Path, new: Path, removed: Collection[str]) -> None:
    for entry in old.iterdir():
        if (new / entry.name).exists() or entry.name in removed:
            continue
        if entry.is_dir():
            shutil.copytree(entry, new / entry.name, symlinks=True)
        else:
            shutil.copy2(entry, new / entry.name, follow_symlinks=False)


def sync(folder: Path) -> None:
    """Wait until everything in a folder is on the disk."""
    for file in [*folder.rglob("*"), folder]:
        if file.is_symlink():
            continue
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
