"""What is removed of an earlier recovery before another one is written: the files that headprune wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import headprune
from headprune.errors import RunError
from headprune.run_folder.recovery import RecoveryFolder, remove_recovery
from helpers import contents
from zoo import ZOO


@pytest.fixture
def recovery(tmp_path: Path) -> Path:
    folder = tmp_path / "finetuned"
    headprune.save(ZOO["bert"].build(), folder / "model")
    (folder / "model" / "README.md").write_text("the card")
    (folder / "finetune.json").write_text("{}")
    (folder / "trainer").mkdir()
    (folder / "round-1" / "model").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    return folder


def test_a_recovery_is_removed_with_its_model(recovery: Path) -> None:
    remove_recovery(recovery)
    assert [entry.name for entry in recovery.iterdir()] == ["notes.txt"]


def test_files_beside_the_model_stay(recovery: Path) -> None:
    """They were deleted with the model."""
    model = recovery / "model"
    (model / "plots").mkdir()
    (model / "plots" / "loss.png").write_bytes(b"mine")
    (model / "model.safetensors").write_bytes(b"changed by its owner")
    remove_recovery(recovery)
    assert not (recovery / "finetune.json").exists()
    left = sorted(entry.name for entry in model.iterdir())
    assert left == ["README.md", "config.json", "model.safetensors", "plots"]
    headprune.save(ZOO["bert"].build(), model, overwrite=True)  # as a recovery does
    assert (model / "plots" / "loss.png").read_bytes() == b"mine"
    assert headprune.load(model).config.model_type == "bert"


@pytest.mark.parametrize("what", ["an adapter", "something else"])
def test_what_a_recovery_cannot_be_saved_over_is_refused_before_it_begins(what: str, recovery: Path) -> None:
    model = recovery / "model"
    if what == "an adapter":
        (model / "adapter_config.json").write_text("{}")
        (model / "adapter_model.safetensors").write_bytes(b"mine")
    else:
        (model / "config.json").unlink()
    before = contents(recovery)
    with pytest.raises(RunError, match=r"move it away\.$"):
        remove_recovery(recovery)
    assert contents(recovery) == before


def test_a_kill_at_any_removal_is_no_obstacle(recovery: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, number, stops = Path.unlink, 0, True
    while stops:
        copy, count = shutil.copytree(recovery, tmp_path / f"copy-{number}"), 0

        def unlink(self: Path, missing_ok: bool = False, stop: int = number) -> None:
            nonlocal count
            count += 1
            if count > stop:
                raise KeyboardInterrupt
            real(self, missing_ok=missing_ok)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", unlink)
            try:
                remove_recovery(copy)
                stops = False
            except KeyboardInterrupt:
                number += 1
        remove_recovery(copy)
        headprune.save(ZOO["bert"].build(), copy / "model", overwrite=True)

    assert number > 4


MEASURED = {"value": 0.5, "interval": [0.3, 0.7]}
ENDED = {
    "of": {},
    "metric": "accuracy",
    "samples": {"training": 30, "evaluation": 6},
    **dict.fromkeys(("dense", "pruned", "recovered"), MEASURED),
    "steps": 2,
    "best_step": 2,
}


@pytest.mark.parametrize("damage", [{"pruned": {}}, {"recovered": {**MEASURED, "value": "x"}}, {"steps": None}])
def test_a_damaged_record_of_a_recovery_that_has_ended_is_refused(damage: dict[str, Any], tmp_path: Path) -> None:
    """Its numbers are printed as they are: a damaged one was a bare KeyError or TypeError."""
    settings = {"distill": 1.0, "hidden": 10.0, "lora": 0, "epochs": 1.0, "learning_rate": 5e-5, "seed": 0}
    record = {"format": 1, "versions": {"headprune": "0"}, "settings": settings, **ENDED}
    (tmp_path / "finetune.json").write_text(json.dumps(record))
    assert RecoveryFolder.is_finished(tmp_path, settings)
    (tmp_path / "finetune.json").write_text(json.dumps({**record, **damage}))
    for read in (RecoveryFolder.is_finished, RecoveryFolder):
        with pytest.raises(RunError, match=r"finetune\.json is damaged: .*; start again with --overwrite\.$"):
            read(tmp_path, settings)
