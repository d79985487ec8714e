"""The folder of a recovery inside a run: what was asked for, what came out, and that only one process writes to it.

finetune.json   settings and fingerprints; at the end dense, pruned and recovered with their intervals, and the losses
model/          the recovered model
trainer/        checkpoints of the training, as long as it goes on
round-1/ ...    where pruning and recovery take turns: a run each, and its recovered model
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout

from headprune import distributed
from headprune.errors import RunError
from headprune.report.recovery import FOLDER, RECORD
from headprune.store.files import write_text

FORMAT = 1


class Recovered:
    """An open folder; use it as a context manager."""

    def __init__(self, run: Path, settings: Mapping[str, Any], *, overwrite: bool = False) -> None:
        self.path = run / FOLDER
        self.settings = json.loads(json.dumps(dict(settings)))
        self.record: dict[str, Any] = {}
        try:
            self.path.mkdir(exist_ok=True)
            self._lock = FileLock(str(self.path / ".lock"))
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RunError(f"Another process is working on {self.path}; wait for it.") from None
        except OSError as error:
            raise RunError(f"Cannot write to {self.path}: {error.strerror}; make room, or change its rights.") from None
        try:
            self._open(overwrite)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, overwrite: bool) -> None:
        file = self.path / RECORD
        if file.is_file() and not overwrite:
            self._refuse_other_settings(file)
            return
        self._describe({})  # the old record is replaced first: what is left of an old recovery belongs to none
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)

    def _refuse_other_settings(self, file: Path) -> None:
        try:
            self.record = json.loads(file.read_text())
            known = dict(self.record["settings"])
        except (ValueError, KeyError, TypeError):
            raise RunError(f"{file} is damaged; start again with --overwrite.") from None
        different = [
            name for name in dict.fromkeys([*known, *self.settings]) if known.get(name) != self.settings.get(name)
        ]
        if different:
            name = different[0]
            others = f" (and {', '.join(different[1:])})" if different[1:] else ""
            raise RunError(
                f"{self.path} belongs to a recovery with other settings: {name} was {known.get(name)!r} and is now "
                f"{self.settings.get(name)!r}{others}; use the same settings, or --overwrite."
            )

    def _describe(self, result: Mapping[str, Any]) -> None:
        from headprune import __version__

        versions = {
            "headprune": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        self.record = {"format": FORMAT, "settings": self.settings, "versions": versions, **result}
        try:
            write_text(self.path / RECORD, json.dumps(self.record, indent=2, allow_nan=False) + "\n")
        except OSError as error:
            raise RunError(
                f"Cannot write to {self.path}: {error.strerror}; make room and run the same command again."
            ) from None

    @property
    def finished(self) -> bool:
        return "recovered" in self.record

    def finish(self, result: Mapping[str, Any]) -> None:
        self._describe(result)

    def __enter__(self) -> Recovered:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


@contextmanager
def opened(run: Path, settings: Mapping[str, Any], *, overwrite: bool = False) -> Iterator[Recovered | None]:
    """The folder, which of several processes the first one alone holds; None in the others."""
    held: list[Recovered] = []

    def take() -> None:
        held.append(Recovered(run, settings, overwrite=overwrite))

    distributed.on_main(take)
    if not held:
        yield None
        return
    with held[0] as folder:
        yield folder


def is_finished(run: Path, settings: Mapping[str, Any]) -> bool:
    """Whether a recovery with these settings has come to its end."""
    try:
        record = json.loads((run / FOLDER / RECORD).read_text())
        return "recovered" in record and record["settings"] == json.loads(json.dumps(dict(settings)))
    except (OSError, ValueError, KeyError, TypeError):
        return False
