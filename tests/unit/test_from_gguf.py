"""Models that transformers has loaded from a GGUF file: it dequantises the weights, so they are pruned and saved like
any others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headprune
from helpers import outputs

WIDTH, HEADS, KV_HEADS, NEURONS, LAYERS, VOCAB = 64, 4, 2, 96, 2, 61
BATCH = {"input_ids": torch.arange(20).reshape(2, 10)}


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """A Llama of random weights, quantised to 8 bits, without a tokenizer."""
    gguf = pytest.importorskip("gguf", reason="comes with headprune[gguf]")
    random = torch.Generator().manual_seed(0)

    def add(name: str, *shape: int) -> None:
        values = torch.randn(*shape, generator=random).numpy()
        kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)

    writer = gguf.GGUFWriter(tmp_path / "llama.gguf", "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(40)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(NEURONS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_q", WIDTH, WIDTH)
        for name in ("attn_k", "attn_v"):
            add(f"blk.{layer}.{name}", WIDTH * KV_HEADS // HEADS, WIDTH)
        add(f"blk.{layer}.attn_output", WIDTH, WIDTH)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{layer}.{name}", NEURONS, WIDTH)
        add(f"blk.{layer}.ffn_down", WIDTH, NEURONS)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{layer}.{name}", WIDTH)
    for name in ("token_embd", "output"):
        add(name, VOCAB, WIDTH)
    add("output_norm", WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "llama.gguf"


def load_gguf(file: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)


@pytest.mark.parametrize("removed", [[], [(0, 0), (0, 1)]], ids=["dense", "pruned"])
def test_what_was_loaded_from_gguf_is_saved(gguf_file: Path, tmp_path: Path, removed: list[tuple[int, int]]) -> None:
    model = load_gguf(gguf_file)
    headprune.remove(model, removed)
    expected = outputs(model, BATCH)["logits"]
    headprune.save(model, tmp_path / "saved")
    loaded = headprune.load(tmp_path / "saved")
    assert torch.equal(outputs(loaded, BATCH)["logits"], expected)
    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=bool(removed))
    torch.testing.assert_close(outputs(plain, BATCH)["logits"], expected)


def test_what_was_loaded_from_gguf_is_trained(gguf_file: Path) -> None:
    model = load_gguf(gguf_file)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    headprune.finetune(model, [BATCH] * 4, epochs=2, batch_size=2)
    assert not all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
