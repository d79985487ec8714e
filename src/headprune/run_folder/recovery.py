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

from headprune.run_folder.folder import RunFolder

FOLDER, RECORD = "finetuned", "finetune.json"


class RecoveryFolder(RunFolder):
    """An open folder of a recovery."""

    record_name, noun, is_inside = RECORD, "recovery", True

    @classmethod
    def _is_complete(cls, path: Path, record: Mapping[str, Any]) -> bool:
        return "recovered" in record

    def _clear(self) -> None:
        (self.path / RECORD).unlink(missing_ok=True)  # first: without it, the rest is removed at the next start
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)

    @property
    def finished(self) -> bool:
        return self._is_complete(self.path, self.record)

    def finish(self, result: Mapping[str, Any]) -> None:
        self._write_record(result)


def read_recovery(run: Path) -> dict[str, Any] | None:
    """The record of a run's recovery; None where there is none, or none that can be read."""
    try:
        record = json.loads((run / FOLDER / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None
