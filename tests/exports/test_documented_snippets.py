"""The documented code for each runtime runs on an exported folder, where nothing but that runtime can be imported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import headprune
from export_helpers import alone
from headprune.exports.export_model import program_of, source_of
from headprune.exports.runtime import RUNTIMES
from headprune.exports.torch_program import TorchProgram
from llamas import pruned as pruned_llama
from llamas import source_of as llama_source
from run_helpers import classifier, sentences, tokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "export.md"
HIDDEN = ("transformers", "tokenizers", "torch")


def snippets() -> dict[str, str]:
    """By the runtime that the first line exports to."""
    section = PAGE.read_text().split("## Code for each runtime\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```py\n(.*?)```", section, flags=re.DOTALL)
    return {re.search(r"--to (\w+)", block).group(1): block for block in blocks}  # type: ignore[union-attr]


def both(name: str, folder: Path, own: str, hidden: Sequence[str]) -> list[str]:
    """What the page's code prints of an exported folder, and what the folder's own program does: one process for
    both, since importing a runtime takes seconds."""
    (folder / "run.py").write_text(program_of(own))
    run = f"import runpy; runpy.run_path({str(folder / 'run.py')!r}, run_name='__main__')"
    code = [snippets()[name].replace("DIR", str(folder)), "print('---')", run]
    return alone("\n".join(code), *hidden).split("---\n")


def test_every_runtime_has_one() -> None:
    assert set(snippets()) == {"onnx", "openvino", "gguf", "torch"} <= set(RUNTIMES)


@pytest.mark.parametrize("name", ["onnx", "openvino", "torch"])
def test_a_classifier(name: str, tmp_path: Path) -> None:
    model = classifier(num_hidden_layers=1)
    headprune.remove(model, [(0, 1), (0, 2)])
    batch = dict(tokenizer()(sentences(3), padding=True, return_tensors="pt"))
    runtime = TorchProgram(compiled=False) if name == "torch" else RUNTIMES[name]
    runtime.write(source_of(model, [batch]), tmp_path, None)
    printed, said = both(name, tmp_path, runtime.snippet(tmp_path), HIDDEN[: -1 if name == "torch" else None])
    assert len(re.findall(r"-?\d+\.\d+", printed)) == model.config.num_labels
    assert "logits (1, 3)" in said


def test_a_language_model(tmp_path: Path) -> None:
    given = llama_source(pruned_llama("llama", "middle-without-heads"), tmp_path / "model")
    (tmp_path / "out").mkdir()
    RUNTIMES["gguf"].write(given, tmp_path / "out", None)
    assert all(both("gguf", tmp_path / "out", RUNTIMES["gguf"].snippet(tmp_path / "out"), HIDDEN))
