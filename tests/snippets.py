"""Executing the code that pages and cards show, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import forked_python
from run_helpers import environment

PROGRAM = Path(__file__).resolve().parent / "programs" / "run_snippets.py"


def executed(snippets: Mapping[str, str], folder: Path, *, missing: Sequence[str] = ()) -> dict[str, str]:
    """What each printed, run in `folder`, where what is `missing` cannot be imported; the first error fails, and so
    does a question."""
    listed = folder / "snippets.json"
    listed.write_text(json.dumps(dict(snippets)))
    if "torch" in missing:  # a process that has never had it
        command = [sys.executable, str(PROGRAM), str(listed), *missing]
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=500,
            cwd=folder,
            env=environment(),
        )
    else:
        done = forked_python.run(PROGRAM, listed, *missing, cwd=folder)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "custom code" not in done.stdout + done.stderr  # nobody is asked a question
    actual = json.loads(done.stdout.splitlines()[-1])
    for name, said in actual.items():
        assert said["error"] is None, f"{name}:\n{snippets[name]}\n{said['error']}"
    return {name: said["out"] for name, said in actual.items()}
