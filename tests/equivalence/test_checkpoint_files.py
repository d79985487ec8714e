"""What happens to the files: what comes along, what stays, and what a kill or an exception in the middle leaves."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

import headprune
import headprune.checkpoint.atomic_files
import headprune.checkpoint.save_load
from headprune.checkpoint import fingerprint, portable_checkpoint
from headprune.errors import CheckpointError
from helpers import contents, identical, kept_heads, outputs, pruned, word_tokenizer
from kill_saves import killed_saves
from zoo import ZOO


def same_model(path: Path, model: Any) -> bool:
    batch = ZOO["bert"].batch(0)
    return identical(outputs(headprune.load(path), batch), outputs(model, batch))


@pytest.fixture
def old(tmp_path: Path) -> Any:
    """A model that has been saved as `model`, alone in its folder."""
    model = pruned(ZOO["bert"])[0]
    headprune.save(model, tmp_path / "model")
    return model


@pytest.fixture
def new() -> Any:
    return pruned(ZOO["bert"], "first-site-gone")[0]


def test_the_tokenizer_of_the_source_comes_along(tmp_path: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.save_pretrained(tmp_path / "dense")
    ZOO["bert"].build().save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "optimizer.pt").write_bytes(b"not for others")
    model = headprune.load(tmp_path / "dense")
    headprune.remove(model, [(0, 0)])
    headprune.save(model, tmp_path / "first")
    headprune.save(headprune.load(tmp_path / "first"), tmp_path / "second")
    for name in ("first", "second"):
        for file in ("tokenizer.json", "tokenizer_config.json"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "dense" / file).read_bytes()
        assert not (tmp_path / name / "optimizer.pt").exists()
        loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert loaded("heads may go")["input_ids"] == tokenizer("heads may go")["input_ids"] == [2, 3, 4]


def test_the_image_processor_of_the_source_comes_along(tmp_path: Path) -> None:
    ZOO["vit"].build().save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "preprocessor_config.json").write_text('{"size": 16}')
    headprune.save(headprune.load(tmp_path / "dense"), tmp_path / "saved")
    assert (tmp_path / "saved" / "preprocessor_config.json").read_text() == '{"size": 16}'


def test_a_given_processor_is_written(tmp_path: Path, new: Any) -> None:
    path = headprune.save(new, tmp_path / "model", processor=word_tokenizer())
    assert transformers.AutoTokenizer.from_pretrained(path)("go heads")["input_ids"] == [4, 2]


@pytest.mark.usefixtures("old")
def test_other_files_of_an_old_checkpoint_are_kept(tmp_path: Path, new: Any) -> None:
    path = tmp_path / "model"
    (path / "README.md").write_text("a model card")
    (path / "runs").mkdir()
    (path / "runs" / "log.txt").write_text("a log")
    headprune.save(new, path)
    assert (path / "README.md").read_text() == "a model card"
    assert (path / "runs" / "log.txt").read_text() == "a log"
    assert [file.name for file in path.glob("*.safetensors")] == ["model.safetensors"]
    assert same_model(path, new)


@pytest.mark.usefixtures("old")
@pytest.mark.parametrize(
    "other",
    [
        *("adapter_model.safetensors", "embeddings.safetensors", "model-00001-of-00009.safetensors"),
        *("model.safetensors", "pytorch_model.bin", "config.json"),  # the first and last: written here, changed since
    ],
)
def test_weights_of_others_are_not_removed(other: str, tmp_path: Path, new: Any) -> None:
    path = tmp_path / "model"
    text = '{"model_type": "bert"}' if other == "config.json" else "of something else"
    (path / other).write_text(text)
    before = contents(path)
    with pytest.raises(CheckpointError, match=rf"headprune\.save did not write.*\({other}\).*overwrite=True"):
        headprune.save(new, path)
    assert contents(path) == before
    headprune.save(new, path, overwrite=True)
    kept = {"adapter_model.safetensors", "embeddings.safetensors"} & {other}
    assert {file.name for file in path.glob("*.safetensors")} == {"model.safetensors", *kept}
    assert not (path / "pytorch_model.bin").exists()
    assert all((path / name).read_text() == text for name in kept)
    assert same_model(path, new)


def test_the_folder_of_another_program_or_library_is_refused(tmp_path: Path, new: Any) -> None:
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "config.json").write_text('{"theme": "dark"}')
    new.save_pretrained(tmp_path / "plain")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "config.json").write_bytes((tmp_path / "plain" / "config.json").read_bytes())
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    before = contents(tmp_path)
    for name, overwrite in (("program", False), ("program", True), ("adapter", True), ("plain", False)):
        with pytest.raises(CheckpointError, match=f"{name} (exists and holds something|holds an adapter|has files)"):
            headprune.save(new, tmp_path / name, overwrite=overwrite)
    assert contents(tmp_path) == before
    assert same_model(headprune.save(new, tmp_path / "plain", overwrite=True), new)


@pytest.mark.usefixtures("old")
def test_files_of_an_old_vocabulary_go_only_where_they_were_written_here(tmp_path: Path, new: Any) -> None:
    path = headprune.save(new, tmp_path / "model", processor=word_tokenizer())
    (path / "vocabulary-notes.txt").write_text("mine")
    smaller = copy.deepcopy(new)
    smaller.config.headprune_vocabulary = {"before": 9, "after": 9}  # as after shrink_vocabulary
    headprune.save(smaller, path)
    assert not (path / "tokenizer.json").exists()
    assert (path / "vocabulary-notes.txt").read_text() == "mine"


def test_a_new_directory_is_made_with_its_parents(tmp_path: Path, new: Any) -> None:
    assert headprune.save(new, str(tmp_path / "a" / "b" / "model")) == tmp_path / "a" / "b" / "model"
    (tmp_path / "empty").mkdir()
    assert same_model(headprune.save(new, tmp_path / "empty"), new)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "empty"]


@pytest.mark.usefixtures("old")
def test_a_relative_path_works(tmp_path: Path, new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    headprune.save(new, "model")
    assert same_model(Path("model"), new)
    assert same_model(Path("./model"), new)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model"]


def test_saving_writes_the_same_bytes_again(tmp_path: Path, old: Any) -> None:
    headprune.save(old, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "model")
    headprune.save(headprune.load(tmp_path / "model"), tmp_path / "third")
    assert contents(tmp_path / "third") == contents(tmp_path / "model")


def test_saving_leaves_the_model_alone(tmp_path: Path, new: Any) -> None:
    new.save_pretrained(tmp_path / "plain")  # transformers itself notes architectures and dtype in the config
    before, parameters, kept = new.config.to_dict(), dict(new.named_parameters()), kept_heads(new)
    headprune.save(new, tmp_path / "model", portable=True)
    assert new.config.to_dict() == before
    assert all(parameter is parameters[name] for name, parameter in new.named_parameters())
    assert kept_heads(new) == kept


MOMENTS = {
    "weights": (transformers.PreTrainedModel, "save_pretrained"),
    "processor": (headprune.checkpoint.save_load, "save_processor"),
    "code": (portable_checkpoint, "write"),
    "fingerprint": (fingerprint, "write"),
    "other-files": (headprune.checkpoint.atomic_files, "_keep_other_files"),
    "sync": (headprune.checkpoint.atomic_files, "sync"),
    "swap": (headprune.checkpoint.atomic_files, "_swap"),
}
ERRORS = {
    "full-disk": (
        OSError(28, "No space left on device"),
        CheckpointError,
        "Cannot save to .* No space left on device; make room",
    ),
    "ctrl-c": (KeyboardInterrupt(), KeyboardInterrupt, None),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_exception_leaves_the_old_one_and_no_litter(
    moment: str, error: str, tmp_path: Path, old: Any, new: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(tmp_path)
    raised, expected, message = ERRORS[error]

    def fail(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(*MOMENTS[moment], fail)
    for name in ("model", "elsewhere") if moment != "other-files" else ("model",):
        with pytest.raises(expected, match=message):
            headprune.save(new, tmp_path / name, portable=moment == "code")
    monkeypatch.undo()
    assert contents(tmp_path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert same_model(tmp_path / "model", old)


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """Before every file operation in turn, with and without an atomic swap of directories, and at random moments."""
    report = killed_saves(tmp_path.resolve())
    assert {scenario: actual["problems"] for scenario, actual in report.items() if actual["problems"]} == {}
    for name in ("over an old one", "over an old one, by renaming"):
        assert report[name]["old"] > 10  # kills before the swap
        assert report[name]["new"] > 1  # kills after it, and the one that was too late
    assert report["for the first time"]["nothing"] > 10
    assert report["for the first time"]["new"] > 0
    assert report["at random moments"]["kills"] == 6


def stop_swap(model: Any, folder: Path, function: str) -> None:
    """Save by renaming, and stop where this function is called for the new directory, or for the old one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(headprune.checkpoint.atomic_files, "_exchange", lambda one, other: False)
        if function == "rename":
            real = Path.rename
            patch.setattr(Path, "rename", lambda self, to: stop() if ".new-" in self.name else real(self, to))
        else:
            patch.setattr(headprune.checkpoint.atomic_files, function, lambda *_: stop())
        with pytest.raises(KeyboardInterrupt):
            headprune.save(model, folder)


def stop() -> None:
    raise KeyboardInterrupt


def test_what_a_kill_between_two_renames_left_is_recovered(tmp_path: Path, old: Any, new: Any) -> None:
    aside = tmp_path / ".model.old"
    stop_swap(new, tmp_path / "model", "rename")
    assert aside.is_dir()
    assert same_model(tmp_path / "model", old)
    assert not aside.exists()

    stop_swap(new, tmp_path / "model", "rename")  # saving recovers it first, and so keeps its other files
    (aside / "README.md").write_text("a model card")
    headprune.save(new, tmp_path / "model")
    assert (tmp_path / "model" / "README.md").is_file()
    assert same_model(tmp_path / "model", new)

    stop_swap(old, tmp_path / "model", "_remove_backup")  # both are there: the new one had been renamed already
    assert aside.is_dir()
    assert same_model(tmp_path / "model", old)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
    assert not [*tmp_path.rglob(".headprune*")]


def test_what_an_earlier_version_left_between_two_renames_is_recovered(tmp_path: Path, old: Any, new: Any) -> None:
    """It left no marker; the folder aside is the only copy."""
    headprune.save(old, tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / ".model.old")
    assert same_model(tmp_path / "model", old)
    assert not (tmp_path / ".model.old").exists()


@pytest.mark.parametrize("exchange", [True, False])
def test_a_folder_of_somebody_else_is_no_backup(
    exchange: bool, tmp_path: Path, old: Any, new: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was deleted, or became the model, by a save and even by a load."""
    notes = tmp_path / ".model.old" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    if not exchange:
        monkeypatch.setattr(headprune.checkpoint.atomic_files, "_exchange", lambda one, other: False)
    assert same_model(tmp_path / "model", old)
    if exchange:
        headprune.save(new, tmp_path / "model")
    else:
        with pytest.raises(CheckpointError, match=r"\.model\.old is in the way, and is not of headprune"):
            headprune.save(new, tmp_path / "model")
    assert same_model(tmp_path / "model", new if exchange else old)
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(CheckpointError, match="There is no directory"):
        headprune.load(tmp_path / "model")
    headprune.save(new, tmp_path / "model")
    assert notes.read_text() == "mine"


def test_a_failed_second_rename_loses_nothing(
    tmp_path: Path, old: Any, new: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if ".new-" in self.name:
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(headprune.checkpoint.atomic_files, "_exchange", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match="Input/output error"):
        headprune.save(new, tmp_path / "model")
    monkeypatch.undo()
    assert same_model(tmp_path / "model", old)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_the_fingerprint_covers_config_and_weights(tmp_path: Path, old: Any) -> None:
    record = json.loads((tmp_path / "model" / "headprune.json").read_text())
    assert sorted(record["files"]) == ["config.json", "model.safetensors"]
    headprune.save(old, tmp_path / "shards", max_shard_size="8KB")
    record = json.loads((tmp_path / "shards" / "headprune.json").read_text())
    shards = {file.name for file in (tmp_path / "shards").glob("*.safetensors")}
    assert set(record["files"]) == shards | {"config.json", "model.safetensors.index.json"}
