"""Saving over a checkpoint in forks that are killed before every single file operation in turn, and at random moments,
and seeing what is there afterwards: scenario -> {"kills": n, "problems": [...], "old": n, "new": n}.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import headprune
from headprune.checkpoint import atomic_files
from helpers import identical, outputs
from zoo import ZOO

BATCH = ZOO["bert"].batch(0)


@functools.cache
def model_without(*heads: tuple[int, int]) -> Any:
    return headprune.remove(ZOO["bert"].build(), heads)


def old_model() -> Any:
    return model_without((0, 1), (2, 3))


def new_model() -> Any:
    return model_without((0, 1), (2, 3), (1, 0), (1, 1), (1, 2), (1, 3))


def die_before_operation(number: int, folder: Path) -> None:
    """Python announces file operations to audit hooks: count those that concern the folder, and die at one."""
    seen = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if not event.startswith(("open", "os.", "shutil.", "tempfile.", "ctypes.dlsym")):
            return
        names = [os.fsdecode(a) for a in arguments if isinstance(a, (str, bytes, os.PathLike))]
        relative = event in ("os.remove", "os.rmdir")  # rmtree names files relative to an open directory
        if relative or "renameat2" in names or any(str(folder) in name for name in names):
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(watch)


def in_child(work: Callable[[], None], kill_after: float | None = None) -> bool:
    """Do the work in a fork; True if it was killed."""
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            work()
            failed = 0
        finally:
            os._exit(failed)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        raise AssertionError("saving failed by itself, so the kills prove nothing")
    return os.WIFSIGNALED(status)


class Scenario:
    def __init__(self, folder: Path, name: str, *, had_old: bool = True, exchange: bool = True) -> None:
        self.folder, self.had_old, self.exchange = folder / name, had_old, exchange
        self.report: dict[str, Any] = {"kills": 0, "problems": [], "old": 0, "new": 0, "nothing": 0}
        self.template = headprune.save(old_model(), folder / f"{name}-template")
        self.expected = {"old": outputs(old_model(), BATCH), "new": outputs(new_model(), BATCH)}

    def reset(self) -> Path:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        if self.had_old:
            shutil.copytree(self.template, self.folder / "model")
        return self.folder / "model"

    def save(self, target: Path) -> None:
        if not self.exchange:  # as on systems that cannot swap two directories in one step
            atomic_files._exchange = lambda one, other: False  # type: ignore[assignment]
        headprune.save(new_model(), target)

    def look(self, target: Path, moment: str) -> None:
        self.report["kills"] += 1
        if not self.had_old and not target.exists():
            self.report["nothing"] += 1
            return
        try:
            actual = outputs(headprune.load(target), BATCH)
            what = next(name for name, expected in self.expected.items() if identical(actual, expected))
            self.report[what] += 1
            headprune.save(new_model(), target)  # and the next save goes through
            if not identical(outputs(headprune.load(target), BATCH), self.expected["new"]):
                self.report["problems"].append(f"{moment}: saving again did not help")
        except Exception as error:
            self.report["problems"].append(f"{moment}: {type(error).__name__}: {error}")

    def at_every_operation(self) -> dict[str, Any]:
        number, killed = 0, True
        while killed:
            target = self.reset()

            def work(target: Path = target, number: int = number) -> None:
                die_before_operation(number, self.folder)
                self.save(target)

            killed = in_child(work)
            self.look(target, f"operation {number}")
            number += 1
        return self.report

    def at_random_moments(self, times: int) -> dict[str, Any]:
        target, rng = self.reset(), random.Random(0)

        def work() -> None:
            while True:
                headprune.save(old_model(), target)
                self.save(target)

        for number in range(times):
            in_child(work, kill_after=rng.uniform(0.0, 0.15))
            self.look(target, f"random moment {number}")
        return self.report


def killed_saves(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        "over an old one": Scenario(folder, "exchange").at_every_operation(),
        "over an old one, by renaming": Scenario(folder, "rename", exchange=False).at_every_operation(),
        "for the first time": Scenario(folder, "first", had_old=False).at_every_operation(),
        "at random moments": Scenario(folder, "random").at_random_moments(6),
    }
