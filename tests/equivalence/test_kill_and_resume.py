"""A run that is killed at random moments, and started again each time, ends as one that was left alone."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import headprune
from killing import start_and_kill
from runs import environment, material, prune_command, same_but_timing, steps_of
from runs import headprune as program

KILLS = 4
KINDS = {
    "held-out": ["--criterion", "gnorm", "--keep", "18"],
    "same-data": ["--same-data", "--criterion", "his", "--keep", "18"],
}


def process(command: list[str], **options: Any) -> subprocess.Popen[str]:
    """It hears an interruption even where this process was started in the background, deaf to it."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_ends_as_one_that_was_left_alone(kind: str, tmp_path: Path) -> None:
    m, killed, alone = material(), tmp_path / "killed", tmp_path / "alone"
    command = prune_command(m.wide, m.data_csv, killed, *KINDS[kind])
    assert start_and_kill(command, KILLS, seed=len(kind)) == ([-signal.SIGKILL] * KILLS, 0)
    assert program(*prune_command(m.wide, m.data_csv, alone, *KINDS[kind])).code == 0
    same_but_timing(killed, alone)
    headprune.load(killed / "model")


@pytest.fixture(scope="module")
def script() -> str:
    """The program as it was installed."""
    found = Path(sys.executable).with_name("headprune")
    if not found.is_file():
        pytest.skip("the program is not installed beside this Python")
    return str(found)


# The program waits for a signal after its fourth step, and says that it does.
WAITING = """
import signal
from pathlib import Path
from headprune.runs.journal import Run

append = Run.append

def append_and_wait(self, step, seconds):
    append(self, step, seconds)
    if step.step == 3:
        Path({reached!r}).touch()
        while True:
            signal.pause()

Run.append = append_and_wait
"""


def test_ctrl_c_ends_with_a_sentence_and_the_same_command_goes_on(script: str, tmp_path: Path) -> None:
    """And while the program runs, a second one is refused."""
    m, out, reached = material(), tmp_path / "run", tmp_path / "reached"
    (tmp_path / "waiting.py").write_text(WAITING.format(reached=str(reached)))
    command = prune_command(m.wide, m.data_csv, out, "--json", "--keep", "26")
    running = process([script, *command, "--plugin", str(tmp_path / "waiting.py")])
    while not reached.exists():
        assert running.poll() is None, running.communicate()[1][-2000:]
        time.sleep(0.01)
    second = program(*command)
    assert second.code == 2
    assert "Another process is working on" in second.err
    running.send_signal(signal.SIGINT)
    printed, said = running.communicate(timeout=600)  # it does not come to an end if it did not hear
    assert running.returncode == 130
    assert printed == ""
    sentence = " ".join(said.split())
    assert f"Interrupted. What was done is in {out}; run the same command again to go on" in sentence
    assert "Traceback" not in said
    assert len(steps_of(out)) == 4
    assert not (out / "model").exists()
    finished = program(*command)
    assert finished.code == 0
    assert finished.json["heads_after"] == 26
    program(*prune_command(m.wide, m.data_csv, tmp_path / "alone", "--keep", "26"))
    same_but_timing(out, tmp_path / "alone")
