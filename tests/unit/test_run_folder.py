"""The folder that runs and recoveries share, and the list of a run's exports, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headprune.errors import RunBusyError, RunError, TrainingError
from headprune.papers.all_attention.plan import Settings
from headprune.papers.all_attention.study import Study
from headprune.papers.all_attention.text import Text
from headprune.papers.paper_models import ReproductionError
from headprune.run_folder import RecoveryFolder, Run, held_lock
from headprune.run_folder.exports import NAME, add_export, forget_exports, read_exports
from headprune.training.checkpoints import claim
from helpers import contents

KINDS = [Run, RecoveryFolder]


def words(noun: str, other: str) -> str:
    return f"belongs to a {noun} with other settings: seed was 0 and is now 1 \\(and {other}\\); use the same settings"


@pytest.mark.parametrize("kind", KINDS)
def test_other_settings_are_refused_in_the_same_words(kind: Any, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with kind(folder, {"seed": 0, "data": "a", "same": 1}):
        pass
    record = (folder / kind.record_name).read_text()
    expected = words(kind.noun, "data")
    with pytest.raises(RunError, match=expected):
        kind(folder, {"seed": 1, "data": "b", "same": 1})
    with pytest.raises(RunError, match=expected):
        kind.is_finished(folder, {"seed": 1, "data": "b", "same": 1})
    assert (folder / kind.record_name).read_text() == record
    with kind(folder, {"seed": 1, "data": "a", "same": 1}, free=["seed"]) as again:
        assert again.changed


def test_folders_of_trainings_and_reproductions_are_refused_in_these_words_too(tmp_path: Path) -> None:
    training, reproduction = tmp_path / "training", tmp_path / "reproduction"
    training.mkdir()
    reproduction.mkdir()
    for _ in range(2):
        claim(training, {"seed": 0, "data": "a", "same": 1})
    with pytest.raises(TrainingError, match=f"{training} {words('training', 'data')}, or another folder\\.$"):
        claim(training, {"seed": 1, "data": "b", "same": 1})
    texts = [Text("help", digest, torch.zeros(9), torch.zeros(9)) for digest in ("0", "1")]
    Study(reproduction, Settings(seed=0), texts[0])._write()
    refused = f"{reproduction} {words('reproduction', 'text_sha256')}, or another directory\\.$"
    with pytest.raises(ReproductionError, match=refused):
        Study(reproduction, Settings(seed=1), texts[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "text",
    [*("{", "[]", '{"format": 1}', '{"settings": 3}'), '{"settings": {"seed": 0}, "versions": {"other-program": "1"}}'],
)
def test_a_record_of_something_else_is_refused_and_its_files_are_kept(
    kind: Any, text: str, overwrite: bool, tmp_path: Path
) -> None:
    """All names that an overwritten run removes."""
    file = tmp_path / "folder" / kind.record_name
    names = ("steps.jsonl", "timing.jsonl", "curve.csv", "report.html", "model/README.md", "layers/a", "round-1/b")
    for name in names:
        (file.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (file.parent / name).write_text("mine")
    file.write_text(text)
    before = contents(file.parent)
    with pytest.raises(RunError, match=f"{kind.record_name} is damaged, or was written by another program; ") as error:
        kind(file.parent, {"seed": 0}, overwrite=overwrite)
    assert "overwrite" not in str(error.value)
    assert contents(file.parent) == before


def test_an_overwritten_recovery_leaves_other_files_in_its_folder(tmp_path: Path) -> None:
    place = tmp_path / "finetuned"
    with RecoveryFolder(place, {"seed": 0}) as folder:
        for name in ("notes/a.txt", "model/config.json", "trainer/state", "round-2/round.json"):
            (place / name).parent.mkdir()
            (place / name).write_text("{}")
        folder.finish({"recovered": {}})
    with RecoveryFolder(place, {"seed": 0}, overwrite=True):
        assert {entry.name for entry in place.iterdir() if entry.is_dir()} == {"notes"}


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_at_a_time(kind: Any, tmp_path: Path) -> None:
    with kind(tmp_path / "folder", {}):
        with pytest.raises(RunBusyError, match="Another process is working on"):
            kind(tmp_path / "folder", {})
        with pytest.raises(RunBusyError, match="Another process"), held_lock(tmp_path / "folder", timeout=0):
            pass
    with held_lock(tmp_path / "folder"), pytest.raises(RunBusyError):
        kind(tmp_path / "folder", {})


def test_an_overwritten_recovery_keeps_nothing_of_the_old_one_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round of the old settings that stayed would be taken for one of the new."""
    place = tmp_path / "finetuned"
    with RecoveryFolder(place, {"seed": 0}) as folder:
        (place / "round-1").mkdir()
        (place / "round-1" / "round.json").write_text("{}")
        folder.finish({"recovered": {}})
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            RecoveryFolder(place, {"seed": 1}, overwrite=True)
    assert not RecoveryFolder.is_finished(place, {"seed": 0})
    with RecoveryFolder(place, {"seed": 1}) as folder:
        assert not folder.finished
        assert not (place / "round-1").exists()


def export(of: str, runtime: str, quantize: str | None = None, **more: Any) -> dict[str, Any]:
    return {"of": of, "runtime": runtime, "quantize": quantize, **more}


def test_an_export_takes_the_place_of_an_earlier_one_of_the_same_kind(tmp_path: Path) -> None:
    add_export(tmp_path, export("model", "onnx", size=1))
    add_export(tmp_path, export("model", "onnx", "int8"))
    add_export(tmp_path, export("finetuned/model", "onnx"))
    listed = add_export(tmp_path, export("model", "onnx", size=2))
    assert listed == read_exports(tmp_path)
    assert listed == [
        export("finetuned/model", "onnx"),
        export("model", "onnx", size=2),
        export("model", "onnx", "int8"),
    ]
    forget_exports(tmp_path, "model")
    assert read_exports(tmp_path) == [export("finetuned/model", "onnx")]
    forget_exports(tmp_path)
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize("text", ["{", '{"exports": 3}', '{"exports": [{}]}'])
def test_a_damaged_list_of_exports_is_forgotten(text: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text)
    forget_exports(tmp_path, "model")
    assert read_exports(tmp_path) == []
