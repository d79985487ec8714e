"""Processes of their own that need not import torch and transformers again: see programs/fork_server.py. Where it
matters what is imported, and how, tests start Python itself."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from run_helpers import environment

PROGRAM = Path(__file__).resolve().parent / "programs" / "fork_server.py"
Done = subprocess.CompletedProcess[str]


@functools.cache
def _server() -> subprocess.Popen[str]:
    """One for all tests of a worker; it ends when its input does."""
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    atexit.register(server.communicate)
    return server


def run(*command: str | Path, cwd: Path | None = None, timeout: float = 500) -> Done:
    """What Python would do with these arguments, offline and with one thread."""
    return _run([list(map(str, command))], [{}], cwd, timeout)[0]


def run_together(*command: str | Path, processes: int, timeout: float = 300) -> list[Done]:
    """The same in several processes that find one another, as `torchrun` starts them."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here already
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    own = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return _run([list(map(str, command))] * processes, own, None, timeout)


def _run(commands: list[list[str]], variables: list[Mapping[str, str]], cwd: Path | None, timeout: float) -> list[Done]:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        asked: list[dict[str, Any]] = [
            {
                "command": command,
                "env": {**environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more},
                "cwd": str(cwd or Path.cwd()),
                "out": f"{folder}/{number}.out",
                "err": f"{folder}/{number}.err",
            }
            for number, (command, more) in enumerate(zip(commands, variables, strict=True))
        ]
        print(json.dumps(asked), file=server.stdin, flush=True)
        if not select.select([server.stdout], [], [], timeout)[0]:
            os.killpg(server.pid, signal.SIGKILL)
            _server.cache_clear()
            raise subprocess.TimeoutExpired(commands[0], timeout)
        codes = json.loads(server.stdout.readline())
        return [
            subprocess.CompletedProcess(
                one["command"], code, Path(one["out"]).read_text(), Path(one["err"]).read_text()
            )
            for one, code in zip(asked, codes, strict=True)
        ]
