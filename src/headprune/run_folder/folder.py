"""A folder with a JSON record of the settings that it was made with: locked, resumable, written atomically."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import transformers
from filelock import FileLock, Timeout

from headprune import distributed
from headprune.checkpoint.atomic_files import write_text
from headprune.checkpoint.paths import is_record
from headprune.errors import RunBusyError, RunError
from headprune.json_forms import Form, FormError, check_form, differing, other_settings
from headprune.search.settings import default_settings, migrated, renamed

if TYPE_CHECKING:
    from typing_extensions import Self

FORMAT = 1
LOCK = ".lock"


class RunFolder:
    """An open folder, locked by one process at a time; use it as a context manager.

    An existing folder is resumed if its settings are the same, and refused otherwise. `free` are settings that may
    differ: they only decide where the work ends. With `overwrite` the work starts again.
    """

    record_name: ClassVar[str]
    form: ClassVar[Form]  # of the record
    noun: ClassVar[str]  # what the folder holds, in messages
    is_inside: ClassVar[bool] = False  # whether it is inside a run, so that the user does not choose its path

    def __init__(
        self, path: str | Path, settings: Mapping[str, Any], *, overwrite: bool = False, free: Collection[str] = ()
    ) -> None:
        self.path = Path(path)
        self.settings = as_json(settings)
        self.changed = False  # whether free settings differ from those of the record
        self.record: dict[str, Any] = {}
        self._refuse_other_content(self.path)
        self._lock = _acquire(self.path, movable=not self.is_inside)
        try:
            if (self.path / self.record_name).is_file() and not overwrite:
                self.record, self.changed = self._read_same(self.path, self.settings, free)
            else:
                self._clear()
                self._write_record({})
            self._read_journal()
        except BaseException:
            self.close()
            raise

    @classmethod
    @contextmanager
    def open_on_main(
        cls, path: Path, settings: Callable[[], Mapping[str, Any]], **options: Any
    ) -> Iterator[Self | None]:
        """The folder in the main process, which alone writes; None in the others."""
        folders: list[Self] = []
        try:
            distributed.on_main(lambda: folders.append(cls(path, settings(), **options)))
            yield folders[0] if folders else None
        finally:
            for folder in folders:
                folder.close()

    @classmethod
    def is_finished(cls, path: Path, settings: Mapping[str, Any], *, free: Collection[str] = ()) -> bool:
        """Whether the work with these settings is complete, with all its files; a folder with other settings is
        refused. Nothing is locked or written."""
        cls._refuse_other_content(path)
        if not (path / cls.record_name).is_file():
            return False
        record, changed = cls._read_same(path, as_json(settings), free)
        return not changed and cls._is_complete(path, record)

    # --- to be overridden ---

    @classmethod
    def _is_complete(cls, path: Path, record: Mapping[str, Any]) -> bool:
        raise NotImplementedError

    @classmethod
    def _refuse_other_content(cls, path: Path) -> None:
        """Refuse a folder whose files would be mixed with those of the work, or removed with them."""
        if (path / cls.record_name).is_file():
            _refuse_foreign(path / cls.record_name)

    def _clear(self) -> None:
        """Remove the files of an earlier process; a kill meanwhile must leave nothing that looks complete."""

    def _read_journal(self) -> None:
        """Read the journal of an earlier process."""

    # --- settings ---

    @classmethod
    def _read_same(cls, path: Path, settings: Mapping[str, Any], free: Collection[str]) -> tuple[dict[str, Any], bool]:
        """The record, and whether free settings differ from it; any other difference is refused."""
        record = read_record(path / cls.record_name, cls.form)
        recorded = dict(record["settings"])
        defaults: dict[str, Any] = {}
        if "repair" in settings:  # of an experiment, whose settings had other names in earlier versions
            recorded, settings, defaults = migrated(recorded), migrated(settings), default_settings()
        different = differing(recorded, settings, defaults)
        refused = [key for key in different if key not in free]
        if refused:
            fix = f"{'' if cls.is_inside else 'another directory, '}or --overwrite"
            raise RunError(other_settings(path, cls.noun, refused, recorded, settings, fix))
        return record, bool(different)

    # --- writing ---

    def _write_record(self, result: Mapping[str, Any]) -> None:
        self.record = {"format": FORMAT, "settings": self.settings, "versions": versions(), **result}
        self.write(self.record_name, json.dumps(self.record, indent=2) + "\n")

    def write(self, name: str, text: str) -> None:
        """Write a file of the folder in one step."""
        try:
            write_text(self.path / name, text)
        except OSError as error:
            raise self._cannot_write(error) from None

    def write_line(self, name: str, line: str) -> None:
        """Append a line to a file of the folder; it is on disk when this returns."""
        file = self.path / name
        size = file.stat().st_size if file.exists() else 0
        try:
            with file.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            if file.exists():
                truncate(file, size)
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError) -> RunError:
        return RunError(
            f"Cannot write to {self.path}: {error.strerror}; make room and run the same command again, which continues "
            "after the last complete step."
        )

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def held_lock(path: Path, *, timeout: float = 60) -> Iterator[None]:
    """The lock of a folder, for a short change to its files that does not depend on its settings; waits up to `timeout`
    seconds for another process."""
    lock = _acquire(path, movable=False, timeout=timeout)
    try:
        yield
    finally:
        lock.release()


def _acquire(path: Path, *, movable: bool, timeout: float = 0) -> FileLock:
    lock = FileLock(str(path / LOCK))
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=timeout)
    except Timeout:
        other = ", or choose another directory" if movable else ""
        raise RunBusyError(f"Another process is working on {path}; wait for it{other}.") from None
    except OSError as error:
        other = "choose another directory" if movable else "make room, or change its permissions"
        raise RunError(f"Cannot write to {path}: {error.strerror}; {other}.") from None
    return lock


def _refuse_foreign(file: Path) -> None:
    """Refuse a file that headprune has not written; its folder may hold somebody else's files."""
    if not is_record(file):
        raise RunError(
            f"{file} is damaged, or was written by another program; move its folder away, or choose another one."
        )


def read_record(file: Path, form: Form) -> dict[str, Any]:
    """The record in a JSON file, which must have this form, with settings of earlier versions under the names that
    they have now."""
    _refuse_foreign(file)
    record: dict[str, Any] = json.loads(file.read_bytes())
    record["settings"] = renamed(record["settings"])
    try:
        check_form(record, form)
    except FormError as error:
        raise RunError(f"{file} is damaged: {error}; start again with --overwrite.") from None
    return record


def versions() -> dict[str, str]:
    from headprune import __version__

    return {
        "headprune": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings after a round trip through JSON."""
    return json.loads(json.dumps(dict(settings)))


def truncate(file: Path, size: int) -> None:
    with file.open("rb+") as stream:
        stream.truncate(size)
