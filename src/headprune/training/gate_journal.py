"""The journal of learned gates, from which the figures of a training are drawn.

gates.jsonl    the members of each gate, then per logged step how open each gate was, and the losses
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from headprune.checkpoint.atomic_files import write_text
from headprune.json_forms import check_form
from headprune.training.learned_gates import LearnedGates

FILE = "gates.jsonl"
HEADER = {"gates": [[int, str, int, int]]}  # site, kind, first member and number of members of each gate
LINE = {"step": int, "open": [float]}


class GateJournal(TrainerCallback):
    """Writes the file beside a run; a resumed training goes on after the step that it resumes from."""

    def __init__(self, gates: LearnedGates, folder: Path) -> None:
        self.gates, self.file = gates, folder / FILE

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        earlier = [line for line in read_lines(self.file) if line.get("step", -1) in range(state.global_step + 1)]
        members = [
            [site_gates.site.index, site_gates.site.kind, ids[0], len(ids)]
            for site_gates in self.gates.layout
            for ids in site_gates.members
        ]
        lines = [{"gates": members}, *(earlier or [self._line(0, {})])]
        write_text(self.file, "".join(json.dumps(line) + "\n" for line in lines))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs and state.is_world_process_zero:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(self._line(state.global_step, logs)) + "\n")

    def _line(self, step: int, logs: Mapping[str, Any]) -> dict[str, Any]:
        is_open = [round(value, 4) for value in self.gates.open_probability().detach().tolist()]
        names = ("task_loss", "expected_units", "open_units", "l0_loss")
        return {"step": step, "open": is_open, **{name: logs[name] for name in names if name in logs}}


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a file whose last one may be cut off; the first lists the gates."""
    lines: list[dict[str, Any]] = []
    for text in file.read_bytes().splitlines() if file.is_file() else ():
        try:
            line = json.loads(text)
            check_form(line, LINE if lines else HEADER)
            if lines and len(line["open"]) != len(lines[0]["gates"]):
                break
        except (ValueError, RecursionError):
            break
        lines.append(line)
    return lines
