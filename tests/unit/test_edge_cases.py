"""Inputs, models and files at the edges: each is handled, or refused with a sentence."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headprune
from headprune.errors import CheckpointError, UnsupportedModelError
from helpers import (
    TOLERANCE,
    assert_unchanged,
    contents,
    difference,
    flat,
    gated_outputs,
    gates_without,
    identical,
    kept_heads,
    outputs,
    pruned,
    some_heads,
    state_of,
)
from zoo import BART, BERT, GQA, VOCAB, ZOO, decoder_batch, image_batch, seq2seq_batch, spread, text_batch

BERT_BATCH = ZOO["bert"].batch(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return headprune.save(pruned(ZOO["bert"])[0], tmp_path / "model")


def change(folder: Path, **settings: Any) -> None:
    old = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**old, **settings}))
    (folder / "headprune.json").unlink()


# --- surgery ---------------------------------------------------------------------------------------------------------


def test_a_tied_projection_whose_other_owner_keeps_its_heads_is_refused() -> None:
    """Slicing the shared weight would pull it out from under the other site."""
    model = ZOO["llama"].build()
    first, second, _ = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight = first.q_proj.weight
    before = state_of(model)
    with pytest.raises(UnsupportedModelError, match="tied to another"):
        headprune.remove(model, [(0, 1)])
    assert_unchanged(model, before)


def test_numbers_of_numpy_and_torch_are_whole_numbers_too() -> None:
    """Heads come out of argsort and nonzero more often than out of a keyboard."""
    numpy = pytest.importorskip("numpy")
    for heads in (numpy.array([[0, 1], [2, 3]]), torch.tensor([[0, 1], [2, 3]]), [(numpy.int64(0), 1), (2, 3)]):
        model = ZOO["bert"].build()
        headprune.remove(model, heads)
        assert kept_heads(model) == [(0, 2, 3), (0, 1, 2, 3), (0, 1, 2)]
        assert json.dumps(model.config.pruned_heads) == '{"0": [1], "2": [3]}'


def test_whisper_returns_a_dict_when_a_cross_site_is_gone() -> None:
    """Whisper's own generate reads keys from every layer of the cross-attention cache."""
    entry = ZOO["whisper"]
    model, dense, inputs = entry.build(), entry.build(), {"input_features": entry.batch(2)["input_features"]}
    gone = flat(next(site for site in headprune.resolve(model) if site.attention == "cross").units())
    headprune.remove(model, gone)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    with headprune.gated(dense, gates_without(headprune.resolve(dense), gone)):
        expected = dense.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options)["sequences"], expected["sequences"])


# --- sites -----------------------------------------------------------------------------------------------------------


def test_a_measured_vision_model_is_a_vision_model() -> None:
    assert {site.place for site in headprune.resolve(ZOO["dinov2"].build())} == {"vision self"}


def swin() -> Any:
    return transformers.SwinModel(
        transformers.SwinConfig(
            image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 4], window_size=4
        )
    )


PLAIN = {k: v for k, v in GQA.items() if k not in ("head_dim", "num_key_value_heads")}
DOUBTFUL = {
    "bitnet": (lambda: transformers.BitNetForCausalLM(transformers.BitNetConfig(**GQA)), decoder_batch),
    "longformer": (
        lambda: transformers.LongformerModel(transformers.LongformerConfig(**BERT, attention_window=4)),
        text_batch,
    ),
    "nystromformer": (lambda: transformers.NystromformerModel(transformers.NystromformerConfig(**BERT)), text_batch),
    "xglm": (
        lambda: transformers.XGLMForCausalLM(
            transformers.XGLMConfig(vocab_size=VOCAB, d_model=24, num_layers=2, attention_heads=4, ffn_dim=20)
        ),
        decoder_batch,
    ),
    "mvp": (lambda: transformers.MvpForConditionalGeneration(transformers.MvpConfig(**BART)), seq2seq_batch),
    "fsmt": (
        lambda: transformers.FSMTForConditionalGeneration(
            transformers.FSMTConfig(**{**BART, "src_vocab_size": VOCAB, "tgt_vocab_size": VOCAB})
        ),
        seq2seq_batch,
    ),
    "swin": (swin, image_batch),
    "gpt-neo": (
        lambda: transformers.GPTNeoForCausalLM(
            transformers.GPTNeoConfig(
                vocab_size=VOCAB,
                hidden_size=24,
                num_layers=2,
                num_heads=4,
                attention_types=[[["global", "local"], 1]],
                max_position_embeddings=40,
            )
        ),
        decoder_batch,
    ),
}


COUPLED = {
    "bitnet": "attn_sub_norm couples all its heads",
    "longformer": "its map query_global did not run on the inputs that were tried",
}


@pytest.mark.parametrize("whole_site", [False, True], ids=["some-heads", "whole-site"])
@pytest.mark.parametrize("name", DOUBTFUL)
def test_measuring_is_exact_or_refuses(name: str, whole_site: bool) -> None:
    """The projections of these families are plain, but what their forward does with them is not."""
    build, batch = DOUBTFUL[name]

    def made() -> Any:
        torch.manual_seed(0)
        model = build().eval()
        spread(model)
        return model

    dense, model = made(), made()
    if name in COUPLED:
        with pytest.raises(UnsupportedModelError, match=COUPLED[name]):
            headprune.resolve(model)
        return
    sites = headprune.resolve(model)
    heads = flat(sites[0].units()) if whole_site else some_heads(sites)
    headprune.remove(model, heads)
    expected = gated_outputs(dense, batch(1), gates_without(headprune.resolve(dense), heads))
    assert difference(expected, outputs(model, batch(1))) <= TOLERANCE


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_the_current_directory_is_a_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacing it would leave the process in a directory that is gone, so saving there may well be refused."""
    expected = outputs(headprune.load(folder), BERT_BATCH)
    monkeypatch.chdir(folder)
    model = headprune.load(".")
    assert identical(outputs(model, BERT_BATCH), expected)
    with contextlib.suppress(CheckpointError):
        headprune.save(model, ".")
    assert Path.cwd() == folder
    assert identical(outputs(headprune.load("."), BERT_BATCH), expected)


def test_saving_through_a_symbolic_link_replaces_what_it_points_to(folder: Path) -> None:
    """The link stays a link."""
    link = folder.parent / "latest"
    link.symlink_to(folder, target_is_directory=True)
    model = pruned(ZOO["bert"], "first-site-gone")[0]
    headprune.save(model, link)
    assert link.is_symlink()
    assert identical(outputs(headprune.load(folder), BERT_BATCH), outputs(model, BERT_BATCH))
    assert sorted(entry.name for entry in folder.parent.iterdir()) == ["latest", "model"]


def test_files_that_are_not_weights_are_kept_whatever_their_suffix(folder: Path) -> None:
    (folder / "training_args.bin").write_bytes(b"not weights")
    headprune.save(pruned(ZOO["bert"])[0], folder)
    assert (folder / "training_args.bin").read_bytes() == b"not weights"


FINGERPRINTS = [
    '{"format": "x", "files": {}}',
    '{"format": 1, "files": []}',
    '{"format": 1, "files": {"config.json": {}}}',
    '{"format": 1, "files": {"config.json": 3}}',
]


@pytest.mark.parametrize("text", FINGERPRINTS)
def test_any_damaged_fingerprint_is_called_damaged(text: str, folder: Path) -> None:
    (folder / "headprune.json").write_text(text)
    before = contents(folder)
    with pytest.raises(CheckpointError, match=r"headprune\.json is damaged"):
        headprune.load(folder)
    assert contents(folder) == before


def test_an_id_that_is_recorded_twice_is_refused(folder: Path) -> None:
    """Counted twice, it would shift all ids of the site."""
    ids = json.loads((folder / "config.json").read_text())["pruned_heads"]
    change(folder, pruned_heads={**ids, "0": [ids["0"][0], *ids["0"]]})
    with pytest.raises(CheckpointError, match=r"pruned_heads|record of removed heads"):
        headprune.load(folder)


SETTINGS = {
    "model-type": {"model_type": "nosuch"},
    "type-of-a-number": {"hidden_size": "many"},
    "uneven-width": {"hidden_size": 25},
    "not-a-model-class": {"architectures": ["pipeline"]},
    "own-section": {"headprune": 3},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_config_that_makes_no_model_is_an_error_of_the_checkpoint(case: str, folder: Path) -> None:
    """The command line promises exit code 2 and one sentence for wrong input."""
    change(folder, **SETTINGS[case])
    with pytest.raises(CheckpointError):
        headprune.load(folder)


@pytest.mark.parametrize("damage", ["shard", "index-missing", "index-damaged"])
def test_an_incomplete_set_of_shards_is_an_error_of_the_checkpoint(damage: str, tmp_path: Path) -> None:
    path = headprune.save(pruned(ZOO["bert"])[0], tmp_path / "model", max_shard_size="8KB")
    (path / "headprune.json").unlink()
    index = path / "model.safetensors.index.json"
    if damage == "shard":
        sorted(path.glob("*.safetensors"))[1].unlink()
    elif damage == "index-missing":
        index.unlink()
    else:
        index.write_text("{")
    with pytest.raises(CheckpointError):
        headprune.load(path)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    """A message that names nothing helps nobody."""
    record = json.loads((folder / "config.json").read_text())["headprune"]
    change(folder, pruned_heads={}, headprune={name: value for name, value in record.items() if name != "layout"})
    with pytest.raises(CheckpointError, match=r"bert\.encoder\.layer\.\d\.attention.*mismatched"):
        headprune.load(folder)
