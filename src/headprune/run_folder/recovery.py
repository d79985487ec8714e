"""The folder `finetuned` of a recovery inside a run: fine-tuning of its pruned model.

finetune.json   settings and fingerprints; at the end dense, pruned and recovered with their intervals, and the losses
model/          the recovered model
trainer/        checkpoints of the training, until it ends
round-1/ ...    where pruning and recovery take turns: a run each, and its recovered model
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from headprune.checkpoint import fingerprint
from headprune.checkpoint.removable_files import ADAPTER
from headprune.errors import RunError
from headprune.json_forms import check_form
from headprune.run_folder.folder import RunFolder, read_record
from headprune.run_folder.record_forms import RECOVERED, RECOVERY

FOLDER, RECORD = "finetuned", "finetune.json"
CONFIG, CARD = "config.json", "README.md"  # of the model


class RecoveryFolder(RunFolder):
    """An open folder of a recovery."""

    record_name, noun, is_inside, form = RECORD, "recovery", True, RECOVERY

    @classmethod
    def _read_same(cls, path: Path, settings: Mapping[str, Any], free: Collection[str]) -> tuple[dict[str, Any], bool]:
        record, changed = super()._read_same(path, settings, free)
        if cls._is_complete(path, record):
            read_record(path / RECORD, RECOVERED)  # whose numbers are printed without a training
        return record, changed

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


def refuse_unremovable(path: Path) -> None:
    """Refuse to start a recovery where something else is in the way of its model."""
    model = path / "model"
    if (model / ADAPTER).is_file():
        raise RunError(
            f"{model} holds an adapter ({ADAPTER}), which transformers would load in place of the recovered model; "
            "move it away."
        )
    if model.is_dir() and any(model.iterdir()) and not (model / CONFIG).is_file():
        raise RunError(f"{model} holds something that is not a model, and the recovered one goes there; move it away.")


def remove_recovery(path: Path) -> None:
    """Remove the files of a recovery; others in its folder and beside its model stay."""
    refuse_unremovable(path)
    model = path / "model"
    (path / RECORD).unlink(missing_ok=True)  # first: without it, the rest is removed at the next start
    for folder in (path / "trainer", *path.glob("round-*")):
        if folder.is_dir():
            shutil.rmtree(folder)
    if model.is_dir():
        _remove_model(model)


def _remove_model(folder: Path) -> None:
    """Remove what `save` wrote, as the headprune.json there lists it, and the card. Where there are other files, the
    card and config.json stay: a checkpoint may be saved there again."""
    entries = {entry.name for entry in folder.iterdir()}
    written = set().union(*fingerprint.unchanged_files(folder)) & entries
    alone = entries <= written | {CARD, CONFIG}
    for name in sorted((entries if alone else written) - {CONFIG, fingerprint.NAME}):
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink()
    # These last, so that a kill leaves what the next start removes, or saves over.
    (folder / fingerprint.NAME).unlink(missing_ok=True)
    if alone:
        (folder / CONFIG).unlink(missing_ok=True)
        folder.rmdir()


def read_recovery(run: Path) -> dict[str, Any] | None:
    """The record of a run's recovery that has ended; None where there is none, or none that can be read."""
    try:
        record = json.loads((run / FOLDER / RECORD).read_bytes())
        check_form(record, RECOVERED)
    except (OSError, ValueError, RecursionError):
        return None
    return dict(record)
