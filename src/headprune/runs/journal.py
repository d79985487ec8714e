"""The run directory: a trajectory that survives a kill at any moment.

run.json       settings, fingerprints, versions; at the end what it cost and what it saved
steps.jsonl    one line per step, on disk before the next step begins
timing.jsonl   seconds per step, apart from the steps, which are the same byte for byte in every run
curve.csv      the curve, for plots
model/         the checkpoint at the stop
sweep/         of a sweep: what was done at each layer
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout

from headprune import distributed
from headprune.errors import RunBusyError, RunError
from headprune.measure.trajectory import Step, curve_csv
from headprune.search.observers import Journal
from headprune.search.settings import default_settings, migrated, renamed
from headprune.store.files import is_there, write_text
from headprune.store.rundir import read_run

FORMAT = 1

__all__ = ["Run", "read_run"]


class Run(Journal):
    """An open run directory; one process at a time. Use it as a context manager, and as an observer of a pruner.

    `free` are settings that may differ from those of an earlier process: they decide where the trajectory ends only.
    """

    def __init__(
        self,
        path: str | Path,
        settings: Mapping[str, Any],
        *,
        overwrite: bool = False,
        free: Sequence[str] = (),
    ) -> None:
        self.path = Path(path)
        self.free = frozenset(free)
        self.changed = False  # whether free settings are others than they were
        self.settings = json.loads(json.dumps(dict(settings)))
        self._lock = FileLock(str(self.path / ".lock"))
        self._prepare(overwrite)

    # --- opening ---

    def _prepare(self, overwrite: bool) -> None:
        _refuse_other_content(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise RunBusyError(
                f"Another process is working on {self.path}; wait for it, or choose another directory."
            ) from None
        except OSError as error:
            raise RunError(f"Cannot write to {self.path}: {error.strerror}; choose another place.") from None
        try:
            self._open(overwrite)
            self.steps = self._read_steps()
        except BaseException:
            self.close()
            raise

    def _open(self, overwrite: bool) -> None:
        described = self.path / "run.json"
        if described.is_file() and overwrite:
            # The record of the old run is replaced last and in one step, so that a kill in between leaves a run.
            (self.path / "sweep" / "layers.jsonl").unlink(missing_ok=True)
            for name in ("steps.jsonl", "timing.jsonl", "curve.csv", "report.html", "model/README.md"):
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.path / "sweep", ignore_errors=True)
            self._describe({})
        elif described.is_file():
            self.record, self.changed = _record_of(self.path, self.settings, self.free)
        else:
            self._describe({})

    def _describe(self, result: Mapping[str, Any]) -> None:
        from headprune import __version__

        self.record = {
            "format": FORMAT,
            "settings": self.settings,
            "versions": {
                "headprune": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            **result,
        }
        self._write("run.json", json.dumps(self.record, indent=2) + "\n")

    def _read_steps(self) -> list[Step]:
        """The whole lines of the journal; a torn last line, from a kill while it was written, is cut off."""
        journal = self.path / "steps.jsonl"
        if not journal.is_file():
            return []
        content = journal.read_bytes()
        steps: list[Step] = []
        good = 0
        for line in content.splitlines(keepends=True):
            try:
                if not line.endswith(b"\n"):
                    break
                step = Step.from_json(json.loads(line))
            except (KeyError, TypeError, ValueError):
                break
            if step.step != len(steps):
                raise RunError(f"{journal} is damaged after step {len(steps) - 1}; start again with --overwrite.")
            steps.append(step)
            good += len(line)
        if content[good:].count(b"\n") > 1:
            raise RunError(f"{journal} is damaged after step {len(steps) - 1}; start again with --overwrite.")
        if good < len(content):
            _cut(journal, good)
        timing = self.path / "timing.jsonl"
        if timing.is_file() and not timing.read_bytes().endswith(b"\n"):
            _cut(timing, timing.read_bytes().rfind(b"\n") + 1)
        return steps

    # --- writing ---

    def step(self, step: Step, seconds: Mapping[str, float]) -> None:
        self.append(step, seconds)

    def drop_short_step(self, every: int | None, groups: Sequence[int]) -> None:
        """Forget a last step that a budget cut short, which it may have where nobody knows how many units a step has: a
        run that goes further takes it whole."""
        if len(self.steps) < 2:
            return
        units = {
            (site, index // groups[site]) if site < len(groups) else (site, index)
            for site, index in self.steps[-1].removed
        }
        if every is None or len(units) < every:
            self.steps.pop()
            lines = [json.dumps(step.to_json()) + "\n" for step in self.steps]
            self._write("steps.jsonl", "".join(lines))

    def append(self, step: Step, seconds: Mapping[str, float]) -> None:
        """Write a step to disk; it counts once it is there."""
        self.write_line("steps.jsonl", json.dumps(step.to_json()))
        self.write_line("timing.jsonl", json.dumps({"step": step.step, **{k: round(v, 4) for k, v in seconds.items()}}))
        self.steps.append(step)

    def finish(self, result: Mapping[str, Any]) -> None:
        self._write("curve.csv", curve_csv(self.steps))
        for name in ("report.html", "model/README.md"):  # of an earlier end of this run
            (self.path / name).unlink(missing_ok=True)
        self._describe(result)

    @property
    def finished(self) -> bool:
        result = self.record.get("result")
        return not self.changed and result is not None and result["steps"] == len(self.steps) - 1

    def write_line(self, name: str, line: str) -> None:
        """One more line of a file of the run, on disk before this returns."""
        file = self.path / name
        size = file.stat().st_size if file.exists() else 0
        try:
            with file.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            if file.exists():
                _cut(file, size)
            raise self._cannot_write(error) from None

    def _write(self, name: str, text: str) -> None:
        try:
            write_text(self.path / name, text)
        except OSError as error:
            raise self._cannot_write(error) from None

    def _cannot_write(self, error: OSError) -> RunError:
        return RunError(
            f"Cannot write to {self.path}: {error.strerror}; make room and run the same command again, which goes on "
            "after the last whole step."
        )

    def close(self) -> None:
        self._lock.release()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def is_finished(path: Path, settings: Mapping[str, Any], free: Collection[str] = ()) -> bool:
    """Whether a run with these settings has come to its end here, with all that belongs to it; a run with other ones is
    refused. Nothing is locked or written."""
    _refuse_other_content(path)
    if not (path / "run.json").is_file():
        return False
    record, changed = _record_of(path, json.loads(json.dumps(dict(settings))), free)
    result, (_, steps) = record.get("result"), read_run(path)
    whole = result is not None and result["steps"] == len(steps) - 1
    return whole and not changed and all((path / name).is_file() for name in ("model/README.md", "report.html"))


def _refuse_other_content(path: Path) -> None:
    is_there(path, RunError)
    if path.is_file():
        raise RunError(f"{path} is a file; choose a directory for the run.")
    if path.is_dir() and not (path / "run.json").is_file() and not _is_blank(path):
        raise RunError(f"{path} exists and holds something that is not a run; choose a new directory.")


def _record_of(path: Path, settings: Mapping[str, Any], free: Collection[str]) -> tuple[dict[str, Any], bool]:
    """The record of the run that is there, and whether free settings are others than they were; refused where any
    other one is."""
    described = path / "run.json"
    try:
        record = json.loads(described.read_text())
        known = record["settings"] = renamed(record["settings"])
    except (ValueError, KeyError, TypeError):
        raise RunError(f"{described} is damaged; start again with --overwrite.") from None
    if "repair" in settings:  # an experiment's, which earlier versions wrote otherwise
        known, settings = migrated(known), migrated(settings)
    keys = dict.fromkeys([*known, *settings])
    silent = default_settings()
    different = [key for key in keys if known.get(key, silent.get(key)) != settings.get(key)]
    changed = any(key in free for key in different)
    different = [key for key in different if key not in free]
    if different:
        key = different[0]
        others = f" (and {', '.join(different[1:])})" if different[1:] else ""
        raise RunError(
            f"{path} belongs to a run with other settings: {key} was {known.get(key)!r} and is now "
            f"{settings.get(key)!r}{others}; use the same settings, another directory, or --overwrite."
        )
    return record, changed


@contextmanager
def opened(path: Path, settings: Callable[[], Mapping[str, Any]], **how: Any) -> Iterator[Run | None]:
    """The run directory, which of several processes the first one alone holds; None in the others."""
    held: list[Run] = []

    def take() -> None:
        held.append(Run(path, settings(), **how))

    try:
        distributed.on_main(take)
        yield held[0] if held else None
    finally:
        for run in held:
            run.close()


def _cut(file: Path, size: int) -> None:
    with file.open("rb+") as stream:
        stream.truncate(size)


def _is_blank(folder: Path) -> bool:
    """Nothing in it, or only what a start that was killed at once leaves behind."""
    return all(entry.name.startswith((".lock", ".run.json.")) for entry in folder.iterdir())
