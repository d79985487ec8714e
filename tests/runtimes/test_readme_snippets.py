"""The README's code for each runtime runs on an exported folder, where nothing but that runtime can be imported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from exporting import alone, program
from headprune.runtimes.exporting import program_of, source_of
from headprune.runtimes.spec import RUNTIMES
from headprune.runtimes.torch_program import TorchProgram
from llamas import pruned as pruned_llama
from llamas import source_of as llama_source
from runs import material, sentences, tokenizer

README = Path(__file__).resolve().parents[2] / "README.md"
HIDDEN = ("transformers", "tokenizers", "torch")


def snippets() -> dict[str, str]:
    """By the runtime that the first line exports to."""
    section = README.read_text().split("## Where it runs\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```py\n(.*?)```", section, flags=re.DOTALL)
    return {re.search(r"--to (\w+)", block).group(1): block for block in blocks}  # type: ignore[union-attr]


def test_every_runtime_has_one() -> None:
    import headprune.runtimes.every  # noqa: F401

    assert set(snippets()) == {"onnx", "openvino", "gguf", "torch"} <= set(RUNTIMES)


@pytest.mark.parametrize("name", ["onnx", "openvino", "torch"])
def test_a_classifier(name: str, tmp_path: Path) -> None:
    import headprune.runtimes.every

    model = headprune.load(material().bert, dtype=torch.float32).eval()
    headprune.remove(model, [(0, 1), (1, 0)])
    batch = dict(tokenizer()(sentences(3), padding=True, return_tensors="pt"))
    runtime = TorchProgram(compiled=False) if name == "torch" else RUNTIMES[name]
    runtime.write(source_of(model, [batch]), tmp_path, None)
    hidden = HIDDEN[: -1 if name == "torch" else None]
    printed = alone(snippets()[name].replace("DIR", str(tmp_path)), *hidden)
    assert len(re.findall(r"-?\d+\.\d+", printed)) == model.config.num_labels
    (tmp_path / "run.py").write_text(program_of(runtime.snippet(tmp_path)))
    assert program(tmp_path, hidden=hidden)


def test_a_language_model(tmp_path: Path) -> None:
    import headprune.runtimes.every  # noqa: F401

    given = llama_source(pruned_llama("llama", "middle-without-heads"), tmp_path / "model")
    (tmp_path / "out").mkdir()
    RUNTIMES["gguf"].write(given, tmp_path / "out", None)
    assert alone(snippets()["gguf"].replace("DIR", str(tmp_path / "out")), *HIDDEN)
    (tmp_path / "out" / "run.py").write_text(program_of(RUNTIMES["gguf"].snippet(tmp_path / "out")))
    assert program(tmp_path / "out")
