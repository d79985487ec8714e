"""What cannot be exported to GGUF is refused with the fix; the snippet runs without headprune."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf", reason="the extra gguf is not installed")
pytest.importorskip("xllamacpp", reason="the extra gguf is not installed")

from headprune.errors import ExportError
from headprune.exports.gguf import Gguf
from headprune.exports.runtime import RUNTIMES, Source
from headprune.tasks import task_of
from llamas import built, pruned, source_of, tokenizer
from zoo import ZOO


@pytest.mark.parametrize("name", ["bert", "t5", "vit", "gpt2", "qwen3", "granite", "gemma2", "phi3"])
def test_other_families(name: str) -> None:
    model = ZOO[name].build()
    source = Source(model, task_of(model), ZOO[name].batch(0))
    with pytest.raises(ExportError, match=r"cannot be exported to GGUF.*--to onnx\.$"):
        RUNTIMES["gguf"].refuse(source)


def test_models_without_a_tokenizer(tmp_path: Path) -> None:
    source = source_of(built("llama", tokenizer()), tmp_path)
    for folder in (None, tmp_path / "nothing"):
        if folder:
            folder.mkdir()
        with pytest.raises(ExportError, match=r"there is none in the folder of the model; save one"):
            Gguf().refuse(Source(source.model, source.task, source.batch, folder))


def test_positions_that_depend_on_the_length(tmp_path: Path) -> None:
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}
    source = source_of(built("llama", tokenizer(), rope_parameters=parameters), tmp_path)
    with pytest.raises(ExportError, match=r"type dynamic depend on the length.*--to onnx"):
        Gguf().refuse(source)


def test_other_activations(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"computes SiLU, and this LlamaForCausalLM has gelu.*--to onnx"):
        Gguf().refuse(source_of(built("llama", tokenizer(), hidden_act="gelu"), tmp_path))


def test_parameters_without_a_place(tmp_path: Path) -> None:
    model = built("llama", tokenizer())
    model.model.layers[1].self_attn.q_norm = torch.nn.LayerNorm(4)
    with pytest.raises(ExportError, match=r"no tensor for model\.layers\.1\.self_attn\.q_norm\.weight.*--to onnx"):
        Gguf().refuse(source_of(model, tmp_path))


def test_scales_of_attention(tmp_path: Path) -> None:
    model = built("llama", tokenizer())
    model.model.layers[1].self_attn.scaling *= 1.5
    with pytest.raises(ExportError, match=r"scales attention by the head size.*--to onnx"):
        Gguf().refuse(source_of(model, tmp_path))


def test_texts_over_the_window(tmp_path: Path) -> None:
    source = source_of(built("mistral", tokenizer(), sliding_window=8), tmp_path)
    with pytest.raises(ExportError, match=r"fewer than the context of 8 tokens of this model; use shorter texts"):
        Gguf().refuse(source)


def test_tokenizers_of_other_models(tmp_path: Path) -> None:
    source = source_of(built("llama", tokenizer()), tmp_path)
    with torch.no_grad():
        source.model.resize_token_embeddings(100)
    with pytest.raises(ExportError, match=r"has \d+ tokens and the model 100"):
        Gguf().refuse(source)


def test_texts_that_are_too_long_for_the_file(tmp_path: Path) -> None:
    source = source_of(built("llama", tokenizer()), tmp_path / "model")
    Gguf().write(source, tmp_path, None)
    runner = Gguf().open(tmp_path, source, threads=1)
    try:
        with pytest.raises(ExportError, match="exceed the context of 128 of this file"):
            runner.next_log_probabilities([5] * 130)
        with pytest.raises(ExportError, match="at least one token"):
            runner.next_log_probabilities([])
    finally:
        runner.close()


def test_what_was_just_opened_can_be_closed(tmp_path: Path) -> None:
    """llama.cpp waits for ever where it is stopped before its loop has begun."""
    source = source_of(built("llama", tokenizer()), tmp_path / "model")
    Gguf().write(source, tmp_path, None)

    def open_and_close() -> None:
        for _ in range(60):
            Gguf().open(tmp_path, source, threads=1).close()

    thread = threading.Thread(target=open_and_close, daemon=True)
    thread.start()
    thread.join(timeout=120)
    assert not thread.is_alive()


def test_a_folder_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"no model\.gguf"):
        Gguf().open(tmp_path)


def test_the_snippet_runs_with_nothing_but_xllamacpp(tmp_path: Path) -> None:
    source = source_of(pruned("qwen2", "uneven"), tmp_path / "model")
    Gguf().write(source, tmp_path, None)
    code = Gguf().snippet(tmp_path).replace("DIR", str(tmp_path))
    code += "import sys\nassert not {'torch', 'transformers', 'headprune', 'gguf'} & set(sys.modules)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
