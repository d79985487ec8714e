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
_MARKER = ".headprune-swap"  # a file in the directory that leaves
_RECORD = "headprune.json"  # of every checkpoint that was saved (fingerprint.NAME)
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
    """Finish a `_swap` that was killed between its two renames. A folder of the same name that has no marker of a swap
    belongs to somebody else."""
    target = target.resolve()
    backup = _backup_path(target)
    if not target.name:
        return
    if _is_marked(backup):
        if target.exists():
            _remove_backup(backup)
        else:
            backup.rename(target)
    elif not target.exists() and (backup / _RECORD).is_file():  # of a version that left no markers
        backup.rename(target)
    if _is_marked(target):
        (target / _MARKER).unlink(missing_ok=True)


def _is_marked(folder: Path) -> bool:
    return not folder.is_symlink() and (folder / _MARKER).is_file()


def _remove_backup(backup: Path) -> None:
    """The marker goes last, so that what a kill leaves is still marked."""
    for entry in backup.iterdir():
        if entry.name == _MARKER:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    (backup / _MARKER).unlink(missing_ok=True)  # a reader may have removed it
    backup.rmdir()


def _backup_path(target: Path) -> Path:
    return target.parent / f".{target.name}.old"


def _swap(fresh: Path, target: Path) -> None:
    if not target.exists():
        fresh.rename(target)
    elif _exchange(fresh, target):
        shutil.rmtree(fresh)
    else:
        backup = _backup_path(target)
        if backup.exists() and any(backup.iterdir() if backup.is_dir() else [backup]):
            raise CheckpointError(f"{backup} is in the way, and is not of headprune; rename it, or save elsewhere.")
        (target / _MARKER).touch()  # in one step, as a kill may come at any
        target.rename(backup)
        fresh.rename(target)
        _remove_backup(backup)


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
