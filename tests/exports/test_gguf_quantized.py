"""Quantised GGUF files: llama.cpp computes with the numbers that are in them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf", reason="the extra gguf is not installed")
pytest.importorskip("xllamacpp", reason="the extra gguf is not installed")

import gguf

from headprune.errors import ExportError
from headprune.exports.gguf import Gguf
from llamas import log_probabilities, pruned, source_of

SIZE = 16
WIDE = {"hidden_size": 96, "head_dim": SIZE}  # rows of 32 numbers, whichever heads are left
PATHS = {
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "attn_output": "self_attn.o_proj",
}


def numbers(file: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a file, as the numbers that its format stands for."""
    return {
        tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        for tensor in gguf.GGUFReader(file).tensors
    }


def unpaired(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of queries or keys back in transformers' order, one after another."""
    result = torch.empty_like(rows)
    for head in range(rows.shape[0] // size):
        for place in range(size):
            half, entry = place % 2, place // 2
            result[head * size + half * (size // 2) + entry] = rows[head * size + place]
    return result


def with_numbers_of(model: Any, file: Path, size: int) -> Any:
    """The model in torch, with the matrices of the file."""
    actual, result = numbers(file), copy.deepcopy(model)
    with torch.no_grad():
        result.model.embed_tokens.weight.copy_(actual["token_embd.weight"])
        result.lm_head.weight.copy_(actual["output.weight"])
        for number, layer in enumerate(result.model.layers):
            for name, path in PATHS.items():
                rows = actual[f"blk.{number}.{name}.weight"]
                target = layer.get_submodule(path).weight
                rows = unpaired(rows, size) if name in ("attn_q", "attn_k") else rows
                target.copy_(rows[: target.shape[0], : target.shape[1]])
                assert not rows[target.shape[0] :].any()  # what was added for whole blocks is nothing
                assert not rows[:, target.shape[1] :].any()
    return result


@pytest.mark.parametrize("quantize", ["q8_0", "q4_0"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_llama_cpp_computes_with_the_numbers_of_the_file(family: str, quantize: str, tmp_path: Path) -> None:
    model = pruned(family, "uneven", **WIDE)
    source = source_of(model, tmp_path / "model")
    Gguf().write(source, tmp_path, quantize)
    runner = Gguf().open(tmp_path, source, threads=1)
    actual = runner(**source.batch).logits
    runner.close()
    assert actual is not None
    wanted = log_probabilities(with_numbers_of(model, tmp_path / "model.gguf", SIZE), source)
    dense = log_probabilities(model, source)
    real = source.batch["attention_mask"].bool()
    gap, rounding = ((actual - other)[real].abs().mean() for other in (wanted, dense))
    assert gap < 0.03  # llama.cpp rounds what goes into quantised matrices as well, to eight bits
    if quantize == "q4_0":  # the rounding of weights is seen, so another oracle would not do
        assert rounding > 5 * gap


@pytest.mark.parametrize("variant", ["first-without-heads", "without-neurons"])
def test_stand_ins_are_quantised_as_well(variant: str, tmp_path: Path) -> None:
    model = pruned("llama", variant, **WIDE)
    source = source_of(model, tmp_path / "model")
    Gguf().write(source, tmp_path, "q8_0")
    runner = Gguf().open(tmp_path, source, threads=1)
    actual = runner(**source.batch).logits
    runner.close()
    assert actual is not None
    real = source.batch["attention_mask"].bool()
    assert (actual - log_probabilities(model, source))[real].abs().mean() < 0.05


def test_formats(tmp_path: Path) -> None:
    """Blocks need rows of 32 numbers: neurons get zeros up to there, other matrices are float16 where they have not."""
    for name, settings in (("wide", WIDE), ("odd", {})):
        source = source_of(pruned("llama", "uneven", **settings), tmp_path / f"{name}-model")
        (tmp_path / name).mkdir()
        Gguf().write(source, tmp_path / name, "q4_0")
    wide, odd = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / name / "model.gguf").tensors}
        for name in ("wide", "odd")
    )
    kinds = {name: wide[f"blk.1.{name}.weight"].tensor_type.name for name in (*PATHS, "attn_norm")}
    assert kinds == {**dict.fromkeys(PATHS, "Q4_0"), "attn_norm": "F32"}
    assert wide["blk.1.ffn_down.weight"].shape.tolist() == [64, 96]  # 37 neurons
    assert wide["token_embd.weight"].tensor_type.name == "Q8_0"
    assert {tensor.tensor_type.name for name, tensor in odd.items() if "_norm" not in name} == {"F16", "Q4_0"}
    assert odd["blk.0.attn_q.weight"].tensor_type.name == "F16"


def test_other_formats_are_refused(tmp_path: Path) -> None:
    source = source_of(pruned("llama", "uneven"), tmp_path / "model")
    with pytest.raises(ExportError, match="q8_0 or q4_0, not as q2_k"):
        Gguf().write(source, tmp_path, "q2_k")
