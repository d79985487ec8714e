"""The notebooks of examples/ run from their first cell to their last, here on tiny models."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest
from examples.execute import execute

import headprune
import llamas
from run_helpers import environment, material

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NOTEBOOKS = sorted(file.name for file in EXAMPLES.glob("*.ipynb"))
LARGEST = 500_000  # bytes of a notebook with its outputs
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|tmp|usr|opt|work|Users|var)/")


def read(name: str) -> Any:
    return nbformat.read(EXAMPLES / name, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: Any) -> Iterator[Any]:
    for cell in code_cells(notebook):
        yield from cell.outputs


def execute_with(name: str, folder: Path, parameters: Mapping[str, Any]) -> Any:
    """Run a notebook in a folder, with these values instead of those of its first code cell."""
    notebook = read(name)
    cell = code_cells(notebook)[0]
    for parameter, value in parameters.items():
        assert re.search(rf"^([^#=]*\W)?{parameter}\b.*=", cell.source, re.MULTILINE), parameter
        cell.source += f"\n{parameter} = {value!r}"
    execute(notebook, folder, {**environment(), "IPYTHONDIR": str(folder / "ipython")})
    return notebook


def mime_types(notebook: Any) -> set[str]:
    return {kind for output in outputs(notebook) for kind in output.get("data", {})}


def test_a_classifier_is_pruned_to_its_budget(tmp_path: Path) -> None:
    m = material()
    shutil.copytree(m.bert, tmp_path / "classifier")  # which the notebook would fine-tune
    (tmp_path / "data").mkdir()
    for name in ("train.tsv", "dev.tsv"):
        shutil.copy(m.data_tsv, tmp_path / "data" / name)
    parameters = {"CALIBRATION_SAMPLES": 12, "EVALUATION_SAMPLES": 12, "BUDGET": {"keep_flops": 0.6}}
    done = execute_with("classifier.ipynb", tmp_path, parameters)
    dense, fast = (headprune.inspect(headprune.load(tmp_path / name)) for name in ("classifier", "fast"))
    assert fast.flops.total <= 0.6 * dense.flops.total
    assert sum(len(site.kept) for site in fast.sites) < sum(site.original for site in fast.sites)
    assert sum(len(site.kept) for site in fast.feed_forward) < sum(site.original for site in fast.feed_forward)
    assert {"image/svg+xml", "text/html"} <= mime_types(done)


def test_a_language_model_is_pruned_to_its_budget(tmp_path: Path) -> None:
    llamas.built("llama", llamas.tokenizer()).save_pretrained(tmp_path / "llama")
    llamas.tokenizer().save_pretrained(tmp_path / "llama")
    parameters = {
        "MODEL": "llama",
        "KEEP_PARAMETERS": 0.8,
        "CALIBRATION_WINDOWS": 8,
        "EVALUATION_WINDOWS": 8,
        "WINDOW": 16,
        "NEW_TOKENS": 4,
    }
    done = execute_with("language_model.ipynb", tmp_path, parameters)
    dense, pruned = (headprune.load(tmp_path / name).num_parameters() for name in ("llama", "pruned"))
    assert pruned <= 0.8 * dense
    printed = "".join(output.text for output in outputs(done) if output.get("name") == "stdout")
    assert printed.splitlines()[-1].startswith(f"{pruned:,} parameters")
    assert "image/svg+xml" in mime_types(done)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_stored_outputs_are_those_of_one_run(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    assert (EXAMPLES / name).stat().st_size < LARGEST
    for output in outputs(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text
        assert not MACHINE_PATH.search(str(output))
