"""A run that is killed at random moments, and started again each time, ends as one that was left alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import headprune
from other_process import PROGRAMS
from runs import environment, material, prune_command, same_but_timing, steps_of
from runs import headprune as program

HEADS = 32  # of the model `wide`: as many steps to be killed in
KILLS = 6
KINDS = {"held-out": ["--criterion", "gnorm"], "same-data": ["--same-data", "--criterion", "his", "--keep", "2"]}


def process(command: list[str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), **options
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_ends_as_one_that_was_left_alone(kind: str, tmp_path: Path) -> None:
    m, killed, alone = material(), tmp_path / "killed", tmp_path / "alone"
    driver = [sys.executable, str(PROGRAMS / "kill_while_pruning.py"), str(killed), str(len(kind)), str(KILLS)]
    running = process([*driver, *prune_command(m.wide, m.data_csv, killed, *KINDS[kind])])
    assert program(*prune_command(m.wide, m.data_csv, alone, *KINDS[kind])).code == 0
    out, err = running.communicate(timeout=300)
    assert running.returncode == 0, err[-2000:]
    found = json.loads(out.splitlines()[-1])
    assert found["code"] == 0, err[-2000:]
    assert len(found["journal"]) == KILLS
    assert max(found["journal"]) > 1  # kills in the midst of the steps, and not only before them
    assert len(steps_of(killed)) > max(found["journal"])
    same_but_timing(killed, alone)
    headprune.load(killed / "model")


@pytest.fixture(scope="module")
def script() -> str:
    """The program as it was installed."""
    found = Path(sys.executable).with_name("headprune")
    if not found.is_file():
        pytest.skip("the program is not installed beside this Python")
    return str(found)


def wait_for(lines: int, out: Path, running: subprocess.Popen[str]) -> None:
    journal = out / "steps.jsonl"
    deadline = time.monotonic() + 120
    while not journal.is_file() or journal.read_bytes().count(b"\n") < lines:
        assert running.poll() is None, running.communicate()[1][-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_ctrl_c_ends_with_a_sentence_and_the_same_command_goes_on(script: str, tmp_path: Path) -> None:
    """And while the program runs, a second one is refused."""
    m, out = material(), tmp_path / "run"
    command = prune_command(m.wide, m.data_csv, out, "--json")
    running = process([script, *command])
    wait_for(4, out, running)
    running.send_signal(signal.SIGSTOP)  # so that it is still there when the second comes
    second = program(*command)
    assert second.code == 2
    assert "Another process is working on" in second.err
    running.send_signal(signal.SIGCONT)
    running.send_signal(signal.SIGINT)
    printed, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert printed == ""
    sentence = " ".join(said.split())
    assert f"Interrupted. What was done is in {out}; run the same command again to go on" in sentence
    assert "Traceback" not in said
    assert 4 <= len(steps_of(out)) < HEADS + 1
    assert not (out / "model").exists()
    finished = program(*command)
    assert finished.code == 0
    assert finished.json["heads_after"] == 0
    program(*prune_command(m.wide, m.data_csv, tmp_path / "alone"))
    same_but_timing(out, tmp_path / "alone")
