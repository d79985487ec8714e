"""Run in a process of its own: start the same `headprune` command again and again, kill it, and start it once more.

Arguments: a directory, a seed, the number of kills, and the command. Each try is a fork that runs the program's own
`main`, killed with SIGKILL when the journal has grown by a few lines and a few milliseconds have passed. The last one
is left alone. Prints one JSON object: what the journal had at each kill, and the exit code of the last one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import headprune.cli.main
import headprune.runs.experiment  # what a command imports when it needs it: here once, before the forks


def start(command: list[str]) -> int:
    child = os.fork()
    if child == 0:
        sys.argv = ["headprune", *command]
        log = os.open(os.devnull, os.O_WRONLY)
        os.dup2(log, 1)
        code = 1
        try:
            headprune.cli.main.main()
            code = 0
        except SystemExit as exit:
            code = int(exit.code or 0)
        finally:
            os._exit(code)
    return child


def lines(journal: Path) -> int:
    return journal.read_bytes().count(b"\n") if journal.is_file() else 0


def ended(child: int) -> int | None:
    """The exit code, or None while it runs."""
    done, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def main() -> None:
    torch.set_num_threads(1)
    out, seed, kills, *command = sys.argv[1:]
    journal, rng = Path(out) / "steps.jsonl", random.Random(int(seed))
    found: list[int] = []
    for _ in range(int(kills)):
        wanted = lines(journal) + rng.randint(0, 4)
        child = start(command)
        code = None
        while lines(journal) < wanted and code is None:
            code = ended(child)
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.05) if code is None else 0)
        code = ended(child) if code is None else code
        if code is not None:
            raise SystemExit(f"ended by itself with {code} after {lines(journal)} lines")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found.append(lines(journal))
    _, status = os.waitpid(start(command), 0)
    print(json.dumps({"journal": found, "code": os.waitstatus_to_exitcode(status)}))


if __name__ == "__main__":
    main()
