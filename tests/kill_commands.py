"""Starting the same `headprune` command again and again, killing it, and starting it once more.

Each try is a fork that runs the program's own `main` and is killed with SIGKILL at a point that the program is known to
be at: before, in the midst of or after a write to its journal, or between the two files of a step.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import headprune.cli.main
import headprune.runs.experiment  # what a command imports when it needs it: here once, before the forks
from headprune.run_folder import Run

MOMENTS = ("before", "torn", "after", "between")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying(write: Callable[..., None], moment: str, steps: int) -> Callable[..., None]:
    """The journal's own write, but the process dies at this moment of the step that comes after so many."""
    seen = 0

    def append(self: Run, name: str, line: str) -> None:
        nonlocal seen
        if name == "timing.jsonl":
            if seen > steps and moment == "between":
                die()
            write(self, name, line)
            return
        seen += 1
        if seen > steps:
            if moment == "before":
                die()
            if moment == "torn":
                with (self.path / name).open("a", encoding="utf-8") as stream:
                    stream.write(line[: len(line) // 2])
                die()
        write(self, name, line)
        if seen > steps and moment == "after":
            die()

    return append


def start(command: list[str], moment: str | None, steps: int) -> int:
    """Fork, run the program, and return how it ended: minus the signal, or its exit code."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sys.argv = ["headprune", *command]
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            if moment is not None:
                changed: Any = dying(Run.write_line, moment, steps)
                Run.write_line = changed  # type: ignore[method-assign]
            headprune.cli.main.main()
            code = 0
        except SystemExit as exit:
            code = int(exit.code or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def start_and_kill(command: list[str], kills: int, seed: int) -> tuple[list[int], int]:
    """How each of the tries that were killed ended, and how the last one did, which was left alone."""
    rng = random.Random(seed)
    ends = [start(command, MOMENTS[number % len(MOMENTS)], rng.randint(0, 3)) for number in range(kills)]
    return ends, start(command, None, 0)
