"""Checkpoints that cannot be loaded, and places that cannot be saved to: one clear sentence each, nothing written."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import headprune
from headprune.checkpoint import fingerprint
from headprune.checkpoint.paths import enclosing_run
from headprune.errors import CheckpointError, UnsupportedModelError
from helpers import assert_unchanged, contents, identical, outputs, pruned, state_of
from zoo import ZOO


def says(*parts: str) -> str:
    """A pattern: these parts, in this order."""
    return ".*".join(re.escape(part) for part in parts)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a good checkpoint: heads (0, *) are gone, and about half of the others."""
    path = headprune.save(pruned(ZOO["bert"], "first-site-gone")[0], tmp_path_factory.mktemp("good") / "model")
    return contents(path)


@pytest.fixture
def folder(saved: dict[str, bytes], tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for name, data in saved.items():
        (path / name).write_bytes(data)
    return path


def settings(**changes: Any) -> Callable[[Path], None]:
    """Change the config, and accept the change: without its fingerprint nothing else looks at it first."""

    def change(folder: Path) -> None:
        old = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**old, **changes}))
        (folder / "headprune.json").unlink()

    return change


def earlier(**changes: Any) -> Callable[[Path], None]:
    """The same for a checkpoint of an earlier version, which carries no layout."""

    def change(folder: Path) -> None:
        settings(**changes)(folder)
        old = json.loads((folder / "config.json").read_text())
        del old["headprune"]["layout"]
        (folder / "config.json").write_text(json.dumps(old))

    return change


def layout(*path: str | int, value: Any) -> Callable[[Path], None]:
    """Change one thing in the layout."""

    def change(folder: Path) -> None:
        old = json.loads((folder / "config.json").read_text())
        place = old["headprune"]
        for part in ("layout", *path)[:-1]:
            place = place[part]
        place[("layout", *path)[-1]] = value
        (folder / "config.json").write_text(json.dumps(old))
        (folder / "headprune.json").unlink()

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], Any], keep_fingerprint: bool = False) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if not keep_fingerprint:
            (folder / "headprune.json").unlink()

    return edit


def truncated(name: str, size: int, *, fingerprint: bool) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:size])
        if not fingerprint:
            (folder / "headprune.json").unlink()

    return cut


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    (folder / "headprune.json").unlink()


def rewrite(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(text)
        if name != "headprune.json":
            (folder / "headprune.json").unlink()

    return write


def flip_a_bit(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(bytes(data))


def double(tensors: dict[str, torch.Tensor]) -> None:
    name = "bert.encoder.layer.1.attention.self.query.weight"
    tensors[name] = torch.cat([tensors[name], tensors[name]])


FIT = "do not fit its config.json"
LAYOUT = "layout in the config of"
QUERY = "bert.encoder.layer.1.attention.self.query.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no-config": (lambda folder: (folder / "config.json").unlink(), says("has no config.json", "give the folder")),
    "config-not-json": (
        rewrite("config.json", "{"),
        says("config.json is not valid JSON", "copy the checkpoint again"),
    ),
    "config-not-text": (
        lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\xfa"),
        says("config.json is not valid JSON"),
    ),
    "config-a-list": (rewrite("config.json", "[1]"), says("config.json names no model_type")),
    "config-no-type": (rewrite("config.json", "{}"), says("config.json names no model_type")),
    "a-pickle": (
        pickled,
        says("holds its weights as a pickle (pytorch_model.bin)", "can run code", "safetensors first"),
    ),
    "no-weights": (lambda folder: (folder / "model.safetensors").unlink(), says("has no *.safetensors file")),
    "missing-file": (
        lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
        says("model.safetensors is missing", "copy the checkpoint again"),
    ),
    "truncated": (truncated("model.safetensors", 5000, fingerprint=True), says("has 5000 bytes, but", "truncated")),
    "truncated-unsigned": (truncated("model.safetensors", 5000, fingerprint=False), says(FIT)),
    "truncated-header": (truncated("model.safetensors", 4, fingerprint=False), says(FIT)),
    "one-bit": (
        flip_a_bit,
        says("model.safetensors does not match the fingerprint", "delete headprune.json to accept"),
    ),
    "edited-config": (
        lambda folder: (folder / "config.json").write_text(
            (folder / "config.json").read_text().replace("gelu", "relu")
        ),
        says("config.json does not match the fingerprint in headprune.json"),
    ),
    "damaged-fingerprint": (
        rewrite("headprune.json", "{"),
        says("headprune.json is damaged", "copy the checkpoint again"),
    ),
    "fingerprint-empty": (rewrite("headprune.json", "{}"), says("headprune.json is damaged")),
    "newer-format": (rewrite("headprune.json", '{"format": 99, "files": {}}'), says("saved in format 99", "upgrade")),
    "missing-tensor": (weights(lambda t: t.pop("classifier.weight")), says(FIT, "classifier.weight is missing")),
    "unexpected-tensor": (weights(lambda t: t.update(extra=torch.ones(1))), says(FIT, "extra is unexpected")),
    "other-shape": (weights(double), says(FIT)),
    "earlier-other-record": (earlier(pruned_heads={"0": [0, 1, 2, 3]}), says(FIT)),
    "earlier-no-record": (earlier(pruned_heads={}), says(FIT)),
    "earlier-no-site": (earlier(pruned_heads={"5": [0]}), says("record of removed heads", "(5, 0) does not exist")),
    "earlier-no-head": (earlier(pruned_heads={"1": [9]}), says("record of removed heads", "(1, 9) does not exist")),
    "other-record": (settings(pruned_heads={"0": [0, 1, 2, 3]}), says(LAYOUT, "the 0 of site 1 in pruned_heads")),
    "no-record": (settings(pruned_heads={}), says(LAYOUT, "the 0 of site 0 in pruned_heads")),
    "site-out-of-range": (settings(pruned_heads={"5": [0]}), says(LAYOUT)),
    "head-out-of-range": (settings(pruned_heads={"1": [9]}), says(LAYOUT)),
    "layout-a-word": (layout(value="all"), says(LAYOUT)),
    "layout-a-number": (layout(value=1), says(LAYOUT)),
    "layout-of-words": (layout(value=["all"]), says(LAYOUT)),
    "layout-empty": (layout(value=[]), says(LAYOUT, "of site 0 in pruned_heads")),
    "layout-twice": (layout(1, "site", value=0), says(LAYOUT, "names a site twice")),
    "layout-other-kind": (layout(0, "kind", value="experts"), says(LAYOUT)),
    "layout-other-count": (layout(1, "left", value=4), says(LAYOUT, "of site 1 in pruned_heads")),
    "layout-other-kept": (layout(1, "kept", value=[0, 1, 2, 3]), says(LAYOUT, "of site 1 in pruned_heads")),
    "layout-no-number": (layout(1, "attributes", "num_attention_heads", value="2"), says(LAYOUT, "is no integer")),
    "layout-other-quirk": (layout(1, "quirk", value="none"), says("layout in the config", "does not fit Bert")),
    "layout-nowhere": (layout(1, "path", value="nowhere"), says(FIT)),
    "layout-other-shape": (layout(1, "tensors", QUERY, value=[4, 16]), says(FIT)),
    "layout-below-nothing": (layout(1, "tensors", QUERY, value=[-4, 16]), says("layout in the config", "does not fit")),
    "record-a-list": (settings(pruned_heads=[[0, 1]]), says("must map site numbers to lists of head numbers")),
    "record-of-words": (settings(pruned_heads={"first": [0]}), says("must map site numbers", "{'first': [0]}")),
    "record-of-text": (settings(pruned_heads={"0": "0123"}), says("must map site numbers", "{'0': '0123'}")),
    "record-of-a-number": (settings(pruned_heads={"0": 1}), says("must map site numbers", "{'0': 1}")),
    "unknown-class": (settings(architectures=["NoSuchModel"]), says("names no model class", "pass it as model_class")),
    "no-class": (settings(architectures=None), says("names no model class", "(None)")),
    "other-class": (settings(architectures=["BertModel"]), says(FIT, "classifier.bias is unexpected", "model_class")),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint(case: str, folder: Path) -> None:
    damage, message = DAMAGES[case]
    headprune.load(folder)
    damage(folder)
    before = contents(folder.parent)
    with pytest.raises(CheckpointError, match=message) as error:
        headprune.load(folder)
    assert "\n" not in str(error.value)
    assert contents(folder.parent) == before


def test_part_of_a_kv_group_in_the_record(tmp_path: Path) -> None:
    path = headprune.save(ZOO["llama-gqa"].build(), tmp_path / "model")
    settings(pruned_heads={"0": [1]})(path)
    with pytest.raises(CheckpointError, match=says("record of removed heads", "can only be removed together")):
        headprune.load(path)


def test_a_pickle_is_not_opened(folder: Path, tmp_path: Path) -> None:
    """Opening this one would leave a file behind."""

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "sprung",)

    (folder / "model.safetensors").unlink()
    (folder / "headprune.json").unlink()
    torch.save({"classifier.weight": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        headprune.load(folder)
    assert not (tmp_path / "sprung").exists()


def test_code_that_comes_with_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    path = headprune.save(pruned(ZOO["bert"])[0], tmp_path / "model", portable=True)
    (path / "modeling_headprune.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit")
    for options in ({}, {"trust_remote_code": True}):
        assert type(headprune.load(path, **options)) is transformers.BertForSequenceClassification
    assert not (tmp_path / "ran").exists()


PLACES = {
    "missing": ("nowhere/at/all", says("There is no directory", "nowhere/at/all", "check the path")),
    "a-file": ("model/config.json", says("config.json is a file; give the directory that headprune.save wrote")),
}


@pytest.mark.parametrize("case", PLACES)
def test_loading_from_a_wrong_place(case: str, folder: Path) -> None:
    name, message = PLACES[case]
    before = contents(folder.parent)
    with pytest.raises(CheckpointError, match=message):
        headprune.load(folder.parent / name)
    assert contents(folder.parent) == before


REFUSED_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "sizes": ({"ignore_mismatched_sizes": True}, says("sets ignore_mismatched_sizes itself", "shapes are refused")),
    "config": ({"config": transformers.BertConfig()}, says("sets config itself", "change model.config after loading")),
    "pickles": ({"use_safetensors": False}, says("sets use_safetensors itself", "convert the weights")),
    "info": ({"output_loading_info": True}, says("sets output_loading_info itself", "leave it out")),
    "settings": ({"num_labels": 5}, says("'num_labels' is no option of loading", "leave it out")),
}


@pytest.mark.parametrize("case", REFUSED_OPTIONS)
def test_options_that_loading_sets_itself_are_refused(case: str, folder: Path) -> None:
    options, message = REFUSED_OPTIONS[case]
    with pytest.raises(CheckpointError, match=message):
        headprune.load(folder, **options)


def test_options_with_the_value_that_loading_gives_them_change_nothing(folder: Path) -> None:
    batch = ZOO["bert"].batch(0)
    options = {"ignore_mismatched_sizes": False, "config": None, "use_safetensors": True, "output_loading_info": False}
    assert identical(outputs(headprune.load(folder, **options), batch), outputs(headprune.load(folder), batch))


def test_a_name_that_is_neither_here_nor_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=says("nobody/nothing is neither a directory here nor", "check the name")):
        headprune.load("nobody/nothing", cache_dir=tmp_path / "cache")


TARGETS = {
    "a-file": ("notes.txt", says("notes.txt is a file; choose a directory to save to")),
    "below-a-file": ("notes.txt/model", says("Cannot write to", "choose another directory")),
    "not-a-checkpoint": ("photos", says("photos exists and holds something that is not a checkpoint", "new directory")),
}


@pytest.mark.parametrize("case", TARGETS)
def test_saving_to_a_wrong_place(case: str, tmp_path: Path) -> None:
    name, message = TARGETS[case]
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.png").write_bytes(b"png")
    model = pruned(ZOO["bert"])[0]
    files, before = contents(tmp_path), state_of(model)
    with pytest.raises(CheckpointError, match=message):
        headprune.save(model, tmp_path / name)
    assert contents(tmp_path) == files
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes.txt", "photos"]
    assert_unchanged(model, before)


def test_saving_a_model_that_cannot_be_read(tmp_path: Path) -> None:
    model = ZOO["bert"].build()
    model.bert.encoder.layer[1].attention.self.key = torch.nn.Identity()
    with pytest.raises(UnsupportedModelError, match=says("layer.1.attention.self.key is a Identity", "not a Linear")):
        headprune.save(model, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_run_json_of_another_program_beside_a_model(folder: Path) -> None:
    """It is no run, so the model is not looked for inside it."""
    expected = outputs(headprune.load(folder), ZOO["bert"].batch(0))
    for text in ('{"settings": {"lr": 1}, "versions": {"trainer": "2"}, "result": {}}', "[]", "{"):
        (folder / "run.json").write_text(text)
        assert identical(outputs(headprune.load(folder), ZOO["bert"].batch(0)), expected)
        assert enclosing_run(folder) is None


def test_the_good_checkpoint_is_good(folder: Path) -> None:
    """Otherwise the cases above could fail for another reason than the one they name."""
    expected = pruned(ZOO["bert"], "first-site-gone")[0]
    assert identical(outputs(headprune.load(folder), ZOO["bert"].batch(0)), outputs(expected, ZOO["bert"].batch(0)))


@pytest.mark.parametrize(
    "name",
    ["../secret", "{outside}", "sub/../../secret", "sub/inside", "..", ".", "", "..\\secret", "C:secret", "a\0b"],
)
@pytest.mark.parametrize("known", [True, False], ids=["right-hash", "wrong-hash"])
def test_a_fingerprint_cannot_ask_for_files_elsewhere(
    name: str, known: bool, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it says about such a file, right or wrong: the answer is the same, and the file is not opened."""
    outside = tmp_path / "secret"
    (folder / "sub").mkdir()
    for file in (outside, folder / "sub" / "inside"):
        file.write_bytes(b"secret")
    digest = hashlib.sha256(b"secret" if known else b"other").hexdigest()
    record = json.loads((folder / "headprune.json").read_text())
    record["files"] = {name.format(outside=outside): {"bytes": 6, "sha256": digest}}
    (folder / "headprune.json").write_text(json.dumps(record))
    opened = []
    monkeypatch.setattr(fingerprint, "_sha256", opened.append)
    with pytest.raises(CheckpointError, match=says("headprune.json is damaged", "copy the checkpoint again")):
        headprune.load(folder)
    assert opened == []
