"""A run that is killed at random moments, and started again each time, ends as one that was left alone."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import headprune
from headprune.__main__ import main
from kill_commands import start_and_kill
from run_helpers import headprune as program
from run_helpers import material, prune_command, same_but_timing, steps_of

KILLS = 4
KINDS = {
    "held-out": ["--criterion", "gnorm", "--keep", "18"],
    "same-data": ["--same-data", "--criterion", "his", "--keep", "18"],
}


def process(command: list[str], out: Path, err: Path) -> int:
    """The id of a fork that runs the program's own `main`, with stdout and stderr in files. It hears an interruption
    even where this process was started in the background, deaf to it."""
    child = os.fork()
    if child == 0:
        code: Any = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.alarm(600)  # should it not hear after all, or nobody interrupt it
            for number, file in ((1, out), (2, err)):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
            sys.stdout, sys.stderr = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(2), "w")
            logging.getLogger().handlers.clear()
            sys.argv = ["headprune", *command]
            main()
            code = 0
        except SystemExit as exit:
            code = exit.code or 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return child


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_ends_as_one_that_was_left_alone(kind: str, tmp_path: Path) -> None:
    m, killed, alone = material(), tmp_path / "killed", tmp_path / "alone"
    # The one that is left alone comes first: what it imports, the forks of the others have.
    assert program(*prune_command(m.wide, m.data_csv, alone, *KINDS[kind])).code == 0
    command = prune_command(m.wide, m.data_csv, killed, *KINDS[kind])
    assert start_and_kill(command, KILLS, seed=len(kind)) == ([-signal.SIGKILL] * KILLS, 0)
    same_but_timing(killed, alone)
    headprune.load(killed / "model")


# The program waits for a signal after its fourth step, and says that it does.
WAITING = """
import signal
from pathlib import Path
from headprune.run_folder import Run

append = Run.step

def append_and_wait(self, step, seconds):
    append(self, step, seconds)
    if step.step == 3:
        Path({reached!r}).touch()
        while True:
            signal.pause()

Run.step = append_and_wait
"""


def test_ctrl_c_ends_with_a_sentence_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """And while the program runs, a second one is refused."""
    m, out, reached = material(), tmp_path / "run", tmp_path / "reached"
    (tmp_path / "waiting.py").write_text(WAITING.format(reached=str(reached)))
    command = prune_command(m.wide, m.data_csv, out, "--json", "--keep", "26")
    streams = tmp_path / "out.txt", tmp_path / "err.txt"
    running = process([*command, "--plugin", str(tmp_path / "waiting.py")], *streams)
    while not reached.exists():
        assert os.waitpid(running, os.WNOHANG) == (0, 0), streams[1].read_text()[-2000:]
        time.sleep(0.01)
    second = program(*command)
    assert second.code == 2
    assert "Another process is working on" in second.err
    os.kill(running, signal.SIGINT)
    ended = os.waitstatus_to_exitcode(os.waitpid(running, 0)[1])
    printed, said = (file.read_text() for file in streams)
    assert ended == 130
    assert printed == ""
    sentence = " ".join(said.split())
    assert f"Interrupted. The same command resumes the work in {out}." in sentence
    assert "Traceback" not in said
    assert len(steps_of(out)) == 4
    assert not (out / "model").exists()
    finished = program(*command)
    assert finished.code == 0
    assert finished.json["heads_after"] == 26
    program(*prune_command(m.wide, m.data_csv, tmp_path / "alone", "--keep", "26"))
    same_but_timing(out, tmp_path / "alone")
