"""The folder `finetuned` of a recovery inside a run: fine-tuning of its pruned model.

finetune.json   settings and fingerprints; at the end dense, pruned and recovered with their intervals, and the losses
model/          the recovered model
trainer/        checkpoints of the training, until it ends
round-1/ ...    where pruning and recovery take turns: a run each, and its recovered model
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headprune.forms import check_form
from headprune.run_folder.folder import RunFolder
from headprune.run_folder.record_forms import RECOVERED, RECOVERY

FOLDER, RECORD = "finetuned", "finetune.json"


class RecoveryFolder(RunFolder):
    """An open folder of a recovery."""

    record_name, noun, is_inside, form = RECORD, "recovery", True, RECOVERY

    @classmethod
    def _is_complete(cls, path: Path, record: Mapping[str, Any]) -> bool:
        return "recovered" in record

    def _clear(self) -> None:
        remove_recovery(self.path)

    @property
    def finished(self) -> bool:
        return self._is_complete(self.path, self.record)

    def finish(self, result: Mapping[str, Any]) -> None:
        self._write_record(result)


def remove_recovery(path: Path) -> None:
    """Remove the files of a recovery; others in its folder stay."""
    (path / RECORD).unlink(missing_ok=True)  # first: without it, the rest is removed at the next start
    for folder in (path / "model", path / "trainer", *path.glob("round-*")):
        if folder.is_dir():
            shutil.rmtree(folder)


def read_recovery(run: Path) -> dict[str, Any] | None:
    """The record of a run's recovery that has ended; None where there is none, or none that can be read."""
    try:
        record = json.loads((run / FOLDER / RECORD).read_bytes())
        check_form(record, RECOVERED)
    except (OSError, ValueError, RecursionError):
        return None
    return dict(record)
