"""Several processes as a launcher starts them: forks that meet at a store of this process, as under torchrun."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

import headprune.cli.main
import headprune.runs.experiment  # what a command imports when it needs it: here once, before the forks

LONGEST = 120  # seconds, after which processes that wait for each other are ended, and the test fails


def together(count: int, work: Callable[[int], Any]) -> list[tuple[int, Any, str]]:
    """Do the work in so many processes, which is given their numbers: how each ended (minus the signal, or its exit
    code), what the work gave there, and what it printed on both streams."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        children = []
        for number in range(count):
            child = os.fork()
            if child == 0:
                _work(work, number, count, store.port, root)
            children.append(child)
        codes = _ended(children)
        actual = []
        for number, code in enumerate(codes):
            given = root / f"{number}.pt"
            value = torch.load(given, weights_only=False) if given.is_file() else None
            actual.append((code, value, (root / f"{number}.txt").read_text()))
    return actual


def _work(work: Callable[[int], Any], number: int, count: int, port: int, root: Path) -> None:
    code = 1
    try:
        written = os.open(root / f"{number}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(written, 1)
        os.dup2(written, 2)
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115  # pytest has put others in their place
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # noqa: SIM115
        torch.set_num_threads(1)
        os.environ.update(
            {
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
        )
        torch.save(work(number), root / f"{number}.pt")
        code = 0
    except SystemExit as exit:
        code = int(exit.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def _ended(children: Sequence[int]) -> list[int]:
    """How they ended. As a launcher does, all are ended when one has failed and the others do not notice."""
    codes: dict[int, int] = {}
    started = time.monotonic()
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                known, status = os.waitpid(child, os.WNOHANG)
                if known:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() - started > LONGEST:
            for child in set(children) - set(codes):
                os.kill(child, 9)
        time.sleep(0.01)
    return [codes[child] for child in children]


def commanded(count: int, *arguments: str | Path) -> list[tuple[int, Any, str]]:
    """The program in so many processes."""

    def run(number: int) -> None:
        sys.argv = ["headprune", *map(str, arguments)]
        headprune.cli.main.main()

    return together(count, run)
