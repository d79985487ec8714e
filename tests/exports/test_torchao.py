"""Quantised after pruning, by torchao: what is computed, how far it is off, and that it comes back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForSequenceClassification

import headprune
from headprune.checkpoint.quantized import NAME, WeightFormat, _pack_int4, _unpack_int4
from headprune.errors import CheckpointError, ExportError, MissingPackageError, UnsupportedModelError
from headprune.units import all_sites
from headprune.units.linear import is_quantized
from helpers import assert_unchanged, difference, identical, outputs, pruned, state_of, telling_variant
from zoo import ZOO

pytest.importorskip("torchao", reason="it comes with headprune[torchao]")
MODELS, KINDS = ("bert", "llama-gqa"), ("int8", "int4")


def small(name: str, kind: str, **options: Any) -> tuple[Any, Any, Any]:
    """A pruned model with a site that is gone, the same quantised, and what was done to it."""
    dense, _ = pruned(ZOO[name], telling_variant(ZOO[name]))
    model, _ = pruned(ZOO[name], telling_variant(ZOO[name]))
    return dense, model, headprune.quantize(model, kind, **options)


def grouped(weight: torch.Tensor, stored: WeightFormat) -> torch.Tensor:
    return weight.detach().double().reshape(len(weight), -1, stored.group)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_with_the_nearest_weights(name: str, kind: str) -> None:
    """Against plain torch in double: a grid from the largest weight of each group, and the nearest value on it, which
    is half a step away at most; and a float model with these weights says the same."""
    dense, model, result = small(name, kind)
    assert len(result.layers) > 10
    for path, stored in result.layers.items():
        lowest, highest = -(2 ** (stored.bits - 1)), 2 ** (stored.bits - 1) - 1
        original = grouped(dense.get_submodule(path).weight, stored)
        step = original.abs().amax(2, keepdim=True) / ((highest - lowest) / 2)
        actual = grouped(model.get_submodule(path).weight.dequantize(), stored)
        assert ((actual - original).abs() <= step / 2 * 1.0001).all(), path
        exact = original / step
        between = ((exact - exact.floor()) - 0.5).abs() < 1e-4  # both neighbours are right
        assert (between | ((actual / step - exact.round().clamp(lowest, highest)).abs() < 1e-4)).all(), path
        with torch.no_grad():
            dense.get_submodule(path).weight.copy_(actual.reshape(len(actual), -1))
    batch = ZOO[name].batch(0)
    assert difference(outputs(dense, batch), outputs(model, batch)) < 1e-5
    plain, _ = pruned(ZOO[name], telling_variant(ZOO[name]))
    assert difference(outputs(plain, batch), outputs(model, batch)) > 1e-4


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back_bit_for_bit(name: str, kind: str, tmp_path: Path) -> None:
    _, model, result = small(name, kind)
    headprune.save(model, tmp_path / "q", portable=True)
    again = headprune.load(tmp_path / "q")
    batch = ZOO[name].batch(0)
    assert identical(outputs(model, batch), outputs(again, batch))
    for path in result.layers:
        one, other = model.get_submodule(path).weight, again.get_submodule(path).weight
        assert type(one) is type(other)
        assert one.dtype == other.dtype
        assert tuple(one.block_size) == tuple(other.block_size)
        for part in ("qdata", "scale", "zero_point"):
            assert torch.equal(getattr(one, part), getattr(other, part))
    assert again.config.pruned_heads == model.config.pruned_heads
    assert type(again) is type(model)
    headprune.save(again, tmp_path / "again")
    assert identical(outputs(model, batch), outputs(headprune.load(tmp_path / "again"), batch))
    assert not list((tmp_path / "q").glob("*.bin")) + list((tmp_path / "q").glob("*.py")), "no pickles, and no code"


@pytest.mark.parametrize(("kind", "smaller"), [("int8", 3.9), ("int4", 6.9)])
def test_files_are_smaller(kind: str, smaller: float, tmp_path: Path) -> None:
    """Of layers as wide as real ones: 8 bits and a scale per row, or 4 and one per 64."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 512}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes)).eval()
    headprune.remove(model, [(0, 0), (1, 1), (1, 2)])
    result = headprune.quantize(model, kind)
    headprune.save(model, tmp_path / "q")
    before = sum(4 * model.get_submodule(path).weight.numel() for path in result.layers)
    with safe_open(tmp_path / "q" / NAME, framework="pt") as file:
        after = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    assert before / after > smaller


def test_a_width_that_no_group_divides_stays_in_int8(tmp_path: Path) -> None:
    """A neuron was removed, and 19 are left: int8 there, and the result says so; elsewhere smaller groups."""
    model = ZOO["bert"].build()
    neurons = next(site.index for site in all_sites(model) if site.kind == "neurons")
    headprune.remove(model, [(0, 0)], neurons=[(neurons, 3)])
    result = headprune.quantize(model, "int4", group_size=10)
    assert result.otherwise == {"bert.encoder.layer.0.output.dense": WeightFormat(8, 19)}
    assert result.layers["bert.encoder.layer.0.attention.output.dense"] == WeightFormat(4, 9)
    assert result.layers["bert.encoder.layer.1.output.dense"] == WeightFormat(4, 10)
    assert result.layers["bert.encoder.layer.1.attention.output.dense"] == WeightFormat(4, 8)
    headprune.save(model, tmp_path / "q")
    batch = ZOO["bert"].batch(0)
    assert identical(outputs(model, batch), outputs(headprune.load(tmp_path / "q"), batch))


@pytest.mark.parametrize("width", [1, 2, 7, 8])
def test_two_values_fit_in_a_byte(width: int) -> None:
    data = torch.randint(-8, 8, (5, width), dtype=torch.int8)
    data[0, 0], data[-1, -1] = -8, 7
    assert torch.equal(_unpack_int4(_pack_int4(data), width), data)
    assert _pack_int4(data).shape == (5, (width + 1) // 2)


def test_what_predicts_words_and_embeddings_stay_as_they_are() -> None:
    _, model, result = small("llama-gqa", "int8")
    assert not is_quantized(model.lm_head.weight)
    assert not is_quantized(model.model.embed_tokens.weight)
    assert all("lm_head" not in path for path in result.layers)


def test_quantising_comes_last() -> None:
    _, model, _ = small("bert", "int8")
    batch = {**ZOO["bert"].batch(0), "labels": torch.zeros(3, dtype=torch.long)}
    cases = {
        "pruned": [lambda: headprune.remove(model, [(1, 0)]), lambda: headprune.prune(model, [batch], keep=0.5)],
        "scored": [lambda: headprune.score(model, [batch])],
        "trained": [lambda: headprune.finetune(model, [batch])],
        "gated": [lambda: headprune.LearnedGates(model, keep=0.5)],
        "quantised": [lambda: headprune.quantize(model, "int4")],
    }
    for what, calls in cases.items():
        for call in calls:
            with pytest.raises(UnsupportedModelError, match=f"cannot be {what}; do that before headprune.quantize"):
                call()
    assert headprune.inspect(model).model_type == "bert"


def test_bad_requests_change_nothing() -> None:
    model = ZOO["bert"].build()
    before = state_of(model)
    with pytest.raises(ExportError, match="takes int8 or int4, not 'int3'"):
        headprune.quantize(model, "int3")  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="at least 8, not 4"):
        headprune.quantize(model, "int4", group_size=4)
    assert_unchanged(model, before)
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel has no torch\.nn\.Linear"):
        headprune.quantize(ZOO["gpt2"].build(), "int8")


def test_loading_warns_of_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """transformers would say of weights from another file that they are missing and made up."""
    _, model, _ = small("bert", "int8")
    headprune.save(model, tmp_path / "q")
    capfd.readouterr()
    headprune.load(tmp_path / "q")
    assert "MISSING" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("kind", KINDS)
def test_it_loads_in_another_precision(kind: str, tmp_path: Path) -> None:
    _, model, _ = small("bert", kind)
    headprune.save(model, tmp_path / "q")
    again = headprune.load(tmp_path / "q", dtype=torch.bfloat16)
    actual = outputs(again, ZOO["bert"].batch(0))
    assert actual["logits"].dtype == torch.bfloat16
    assert difference(outputs(model, ZOO["bert"].batch(0)), actual) < 0.1


def test_a_layer_that_is_in_no_file_is_missed(tmp_path: Path) -> None:
    _, model, _ = small("bert", "int8")
    headprune.save(model, tmp_path / "q")
    (tmp_path / "q" / "headprune.json").unlink()
    file = tmp_path / "q" / NAME
    file.write_bytes(with_layer(file.read_bytes(), None))
    with pytest.raises(CheckpointError, match=r"\.weight is missing"):
        headprune.load(tmp_path / "q")
    file.write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"quantized\.safetensors does not fit the model"):
        headprune.load(tmp_path / "q")


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    _, model, _ = small("bert", "int4")
    headprune.save(model, tmp_path / "q")
    file = tmp_path / "q" / NAME
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="does not match the fingerprint"):
        headprune.load(tmp_path / "q")
    (tmp_path / "q" / "headprune.json").unlink()
    headprune.load(tmp_path / "q")
    file.write_bytes(with_layer(content, "bert.encoder.layer.9.output.dense"))
    with pytest.raises(CheckpointError, match=r"quantized\.safetensors does not fit the model"):
        headprune.load(tmp_path / "q")


def with_layer(content: bytes, other: str | None) -> bytes:
    """The same file, whose record names another layer in the place of the first one, or none."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    layers = json.loads(header["__metadata__"]["layers"])
    first = next(iter(layers))
    stored = layers.pop(first)
    if other is not None:
        layers[other] = stored
        for part in ("data", "scale"):
            header[f"{other}.{part}"] = header.pop(f"{first}.{part}")
    header["__metadata__"]["layers"] = json.dumps(layers)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def test_plain_transformers_does_not_load_half_of_it(tmp_path: Path) -> None:
    _, model, _ = small("bert", "int8")
    headprune.save(model, tmp_path / "q")
    with pytest.raises(OSError, match="no file named"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "q")


def test_a_model_in_float_takes_the_place_of_a_quantised_one(tmp_path: Path) -> None:
    dense, model, _ = small("bert", "int8")
    headprune.save(model, tmp_path / "q")
    headprune.save(dense, tmp_path / "q")
    again = headprune.load(tmp_path / "q")
    assert not any(is_quantized(parameter) for parameter in again.parameters())
    assert identical(outputs(dense, ZOO["bert"].batch(0)), outputs(again, ZOO["bert"].batch(0)))


def test_without_torchao_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, model, _ = small("bert", "int8")
    headprune.save(model, tmp_path / "q")
    headprune.save(dense, tmp_path / "float")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    headprune.load(tmp_path / "float")
    with pytest.raises(MissingPackageError, match=r"need torchao; install it with pip install 'headprune\[torchao\]'"):
        headprune.load(tmp_path / "q")
