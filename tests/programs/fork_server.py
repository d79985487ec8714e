"""Starts processes that are new, but for the code of torch and transformers, which takes longer to import than what
most of them do. Nothing of headprune is ever imported here.

Reads requests from stdin, a JSON list of processes on each line, and answers with the list of their exit codes. What a
process runs is given as Python takes it: ["-c", CODE, ...], ["-m", MODULE, ...] or [FILE, ...].
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers.pipelines  # noqa: F401  # and most of transformers with it

torch.set_num_threads(1)


def run(command: list[str]) -> None:
    first, *rest = command
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv, sys.path[0] = rest, ""
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = command, str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


def live(process: dict[str, Any]) -> int:
    """The life of a child; its exit code."""
    os.environ.clear()
    os.environ.update(process["env"])
    os.chdir(process["cwd"])
    written = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, (file, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), (process["out"], written), (process["err"], written)]
    ):
        os.dup2(os.open(file, flags), number)
    known = process["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in known if folder and folder not in sys.path]
    try:
        run(process["command"])
    except SystemExit as exit:
        if not isinstance(exit.code, int | None):
            print(exit.code, file=sys.stderr)
            return 1
        return exit.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def started(process: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        code = live(process)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    gc.freeze()  # what is imported stays, and is shared with all children
    for line in sys.stdin:
        assert "headprune" not in sys.modules
        children = [started(process) for process in json.loads(line)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)
