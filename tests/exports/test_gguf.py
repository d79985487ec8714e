"""GGUF files in llama.cpp say what torch says, however unevenly a model was pruned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf", reason="the extra gguf is not installed")
pytest.importorskip("xllamacpp", reason="the extra gguf is not installed")

from headprune.exports.gguf import Gguf
from headprune.exports.runtime import RUNTIMES, Source
from llamas import FAMILIES, HEADS, LAYERS, PRUNED, SIZE, greedy, log_probabilities, pruned, source_of, tokenizer

NEAR = 1e-3  # a tenth of what is promised


def exported(source: Source, folder: Path, quantize: str | None = None) -> Path:
    folder.mkdir()
    RUNTIMES["gguf"].write(source, folder, quantize)
    return folder


def compare(model: Any, tmp_path: Path, tokens: int = 20) -> float:
    """The largest difference of log-probabilities; the tokens that are generated have to be the same."""
    source = source_of(model, tmp_path / "model")
    runner = Gguf().open(exported(source, tmp_path / "file"), source, threads=1)
    try:
        actual, wanted = runner(**source.batch).logits, log_probabilities(model, source)
        assert actual is not None
        assert actual.shape == wanted.shape
        prompt = {name: rows[1:2] for name, rows in source.batch.items()}
        ids = prompt["input_ids"][prompt["attention_mask"].bool()].tolist()
        assert runner.generate(prompt, tokens) == greedy(model, ids, tokens)
        return float((actual - wanted).abs().max())
    finally:
        runner.close()


CASES = [
    *(("qwen2", variant) for variant in PRUNED),  # biases of queries, keys and values
    *(("llama-biased", variant) for variant in PRUNED),  # biases everywhere, those of empty layers too
    *((family, variant) for family in FAMILIES for variant in ("uneven", "first-without-heads")),
    *(("llama", variant) for variant in ("without-neurons", "last-without-heads", "all-empty")),
]


@pytest.mark.parametrize(("family", "variant"), dict.fromkeys(CASES))
def test_llama_cpp_says_what_torch_says(family: str, variant: str, tmp_path: Path) -> None:
    assert compare(pruned(family, variant), tmp_path) < NEAR


def test_empty_layers_of_the_tests_have_biases() -> None:
    model = pruned("llama-biased", "first-and-last-empty")
    empty = [layer for layer in model.model.layers if not hasattr(layer.self_attn, "q_proj")]
    assert len(empty) == 2
    assert all(layer.self_attn.o_proj.bias.abs().max() > 0.1 for layer in empty)
    assert all(layer.mlp.down_proj.bias.abs().max() > 0.1 for layer in empty)


SCALED = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_positions(kind: str, tmp_path: Path) -> None:
    parameters = {**SCALED[kind], "rope_theta": 500.0}
    model = pruned("llama", "uneven", rope_parameters=parameters)
    plain = pruned("llama", "uneven", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    source = source_of(model, tmp_path / "plain")
    assert (log_probabilities(model, source) - log_probabilities(plain, source)).abs().max() > 0.05  # it matters
    assert compare(model, tmp_path) < NEAR


def test_windows_become_the_length_of_texts(tmp_path: Path) -> None:
    import gguf

    source = source_of(pruned("mistral", "uneven"), tmp_path / "model")
    fields = gguf.GGUFReader(exported(source, tmp_path / "file") / "model.gguf").fields
    assert fields["deci.context_length"].contents() == 64


def test_the_file_has_the_numbers_of_every_layer(tmp_path: Path) -> None:
    import gguf

    source = source_of(pruned("llama", "first-without-heads"), tmp_path / "model")
    reader = gguf.GGUFReader(exported(source, tmp_path / "file") / "model.gguf")
    number = {name: reader.fields[f"deci.{name}"].contents() for name in NUMBERS}
    assert number["block_count"] == LAYERS
    assert number["attention.head_count"] == [HEADS, 4, 6, 2, 6]  # the first has none: heads without keys
    assert number["attention.head_count_kv"] == [0, 2, 3, 1, 3]
    assert number["feed_forward_length"] == [50, 37, 33, 50, 50]
    shapes = {tensor.name: tensor.shape.tolist()[::-1] for tensor in reader.tensors}
    assert shapes["blk.1.attn_q.weight"] == [4 * SIZE, 42]
    assert "blk.0.attn_q.weight" not in shapes
    silent = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.attn_output.weight")
    assert not silent.data.any()


NUMBERS = ("block_count", "attention.head_count", "attention.head_count_kv", "feed_forward_length")


def test_layers_that_change_nothing_are_left_out(tmp_path: Path) -> None:
    import gguf

    source = source_of(pruned("qwen2", "first-and-last-empty"), tmp_path / "model")
    fields = gguf.GGUFReader(exported(source, tmp_path / "file") / "model.gguf").fields
    assert fields["deci.block_count"].contents() == LAYERS - 2


def test_only_the_last_positions(tmp_path: Path) -> None:
    model = pruned("llama", "uneven")
    source = source_of(model, tmp_path / "model")
    runner = Gguf().open(exported(source, tmp_path / "file"), source, threads=1)
    actual, wanted = runner(**source.batch, last=2).logits, log_probabilities(model, source)
    runner.close()
    assert actual is not None
    assert (actual[:, -2:] - wanted[:, -2:]).abs().max() < NEAR
    assert not actual[:, :-2].any()


def test_generation_goes_on_where_a_text_ends(tmp_path: Path) -> None:
    """`generate` gives the most probable tokens, even where one of them ends the text."""
    model, words = pruned("llama", "uneven"), tokenizer()
    ids = words("headprune removes")["input_ids"]
    said = greedy(model, ids, 8)
    if words.eos_token_id not in said:  # then the third token becomes it, or an earlier one that is the same
        with torch.no_grad():
            rows = model.lm_head.weight[[words.eos_token_id, said[2]]].clone()
            model.lm_head.weight[[said[2], words.eos_token_id]] = rows
    wanted = greedy(model, ids, 8)
    assert words.eos_token_id in wanted
    source = source_of(model, tmp_path / "model")
    runner = Gguf().open(exported(source, tmp_path / "file"), source, threads=1)
    said = runner.generate({"input_ids": torch.tensor([ids])}, 8)
    runner.close()
    assert said == wanted
