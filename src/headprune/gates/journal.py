"""What gates did while they learnt, line by line: the picture of a training is drawn from it.

gates.jsonl    first whose gates they are, then per logged step how open each was, and the losses
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from headprune.gates.learned import LearnedGates
from headprune.store.files import write_text

FILE = "gates.jsonl"


class GateJournal(TrainerCallback):
    """Writes the file beside a run; a resumed training goes on after the step that it resumes from."""

    def __init__(self, gates: LearnedGates, folder: Path) -> None:
        self.gates, self.file = gates, folder / FILE

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        known = [line for line in read_lines(self.file) if line.get("step", -1) in range(state.global_step + 1)]
        whose = [
            [place.site.index, place.site.kind, ids[0], len(ids)]
            for place in self.gates.places
            for ids in place.members
        ]
        lines = [{"gates": whose}, *(known or [self._line(0, {})])]
        write_text(self.file, "".join(json.dumps(line) + "\n" for line in lines))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is not None and "loss" in logs and state.is_world_process_zero:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(self._line(state.global_step, logs)) + "\n")

    def _line(self, step: int, logs: Mapping[str, Any]) -> dict[str, Any]:
        is_open = [round(value, 4) for value in self.gates.open_probability().detach().tolist()]
        names = ("task_loss", "expected_units", "open_units", "l0_loss")
        return {"step": step, "open": is_open, **{name: logs[name] for name in names if name in logs}}


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may have been cut off."""
    found: list[dict[str, Any]] = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found
