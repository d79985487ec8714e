"""Models with uneven layers compute in ONNX Runtime and OpenVINO what they compute in PyTorch."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune
from export_helpers import alone, batches, said, smaller, source, written
from headprune.exports.check_outputs import TOKENS, prompt_of
from headprune.exports.onnx.run import open_folder
from headprune.exports.onnx.write import write_programs
from headprune.exports.openvino import OpenVino, convert
from headprune.exports.program_runner import ProgramRunner
from headprune.exports.programs import programs_of
from headprune.exports.runtime import RUNTIMES, Source
from headprune.exports.sample_input import write_sample
from headprune.snippets.programs import OPENVINO, numpy_snippet
from headprune.tasks import task_of
from helpers import flat
from zoo import ZOO

# By family: which site has no heads at all, and how many layers there are, where fewer than in the zoo show as much. Of
# T5 and Whisper, these are sites of the decoder: its cross attention and its own.
TWO = {"num_hidden_layers": 2}
FAMILIES: dict[str, tuple[int, dict[str, int]]] = {
    "bert": (1, {}),
    "vit": (1, TWO),
    "gpt2": (0, {}),
    "llama-gqa": (1, TWO),
    "t5": (2, {"num_layers": 1}),
    "whisper": (1, {"encoder_layers": 1}),
}
WRITING = ("gpt2", "llama-gqa", "t5", "whisper")
FORMS = {"gpt2": "causal", "llama-gqa": "causal", "t5": "seq2seq", "whisper": "seq2seq"}


def allowed(reference: torch.Tensor) -> float:
    """Sums of float32 in another order, through a few layers: what exports are held to, and a tenth of it."""
    return 1e-5 * max(1.0, float(reference.abs().max()))


def agrees(given: Source, name: str, runner: ProgramRunner) -> None:
    for batch in batches(name):
        reference = said(given, given.model, batch)
        assert (said(given, runner, batch) - reference).abs().max() <= allowed(reference)
    if name in WRITING:
        prompt = prompt_of(given)
        assert runner.generate(prompt, TOKENS) == written(given, prompt, TOKENS)


@functools.cache
def exported(name: str) -> tuple[Source, Path]:
    """A model and the folder of its ONNX programs, written once for all tests of a process."""
    empty, numbers = FAMILIES[name]
    given, folder = source(name, empty, **numbers), Path(tempfile.mkdtemp(prefix="headprune-onnx-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_sample(given, folder)
    write_programs(programs_of(given), folder)
    return given, folder


@pytest.mark.parametrize("name", FAMILIES)
def test_uneven_models_agree_with_pytorch(name: str, tmp_path: Path) -> None:
    given, onnx = exported(name)
    programs = programs_of(given)
    assert programs.form == FORMS.get(name, "plain")
    xml = tmp_path / "openvino"
    xml.mkdir()
    write_sample(given, xml)
    agrees(given, name, open_folder(onnx, threads=1))
    for part in programs.parts:
        convert(onnx / f"{part.name}.onnx", xml / f"{part.name}.xml", None)
    runner = OpenVino().open(xml, threads=1)
    agrees(given, name, runner)

    # What people copy runs where there is nothing but the runtime, and both runtimes print the same.
    texts = {
        onnx: RUNTIMES["onnx"].snippet(onnx),
        xml: numpy_snippet(OPENVINO, runner.shapes),
    }
    hidden = ("torch", "transformers", "tokenizers")
    printed = {folder: alone(text.replace("DIR", str(folder)), *hidden) for folder, text in texts.items()}
    if name in WRITING:
        assert printed[onnx] == printed[xml]
    assert all(printed.values())


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_layers_without_heads_remember_nothing(name: str) -> None:
    """Keys and values go in and out of layers that attend, with the number of heads that each has."""
    gone, numbers = FAMILIES[name]
    given = source(name, gone, **numbers)
    decoder = programs_of(given).parts[-1]
    sites = [site for site in _sites(given) if site.stack != "encoder"]
    side = {"self": "decoder.", "cross": "encoder."} if name == "t5" else {"self": ""}
    wanted = {}
    for kind, part in side.items():
        for layer, site in enumerate(site for site in sites if site.attention == kind):
            if site.kept:
                wanted[f"past_key_values.{layer}.{part}key"] = site.kv_heads
    actual = {key: value.shape[1] for key, value in decoder.inputs.items() if key.endswith("key")}
    assert actual == wanted
    assert len(wanted) == len(sites) - 1


def _sites(given: Source) -> list[Any]:
    return list(headprune.resolve(given.model))


def test_a_decoder_without_any_heads_is_exported(tmp_path: Path) -> None:
    """No layer remembers anything, and yet positions have to be counted."""
    model = smaller(ZOO["gpt2"].build, **TWO)
    headprune.remove(model, flat(unit for site in headprune.resolve(model) for unit in site.units()))
    task = task_of(model)
    given = Source(model, task, ZOO["gpt2"].batch(5))
    write_programs(programs_of(given), tmp_path)
    agrees(given, "gpt2", open_folder(tmp_path, threads=1))


def test_left_padding_shifts_positions_only_where_asked() -> None:
    """With the positions that `generate` gives to a padded row, it says what the row says alone."""
    _, folder = exported("llama-gqa")
    runner = open_folder(folder, threads=1)
    padded = batches("llama-gqa")[0]
    mask = padded["attention_mask"]
    row = int(mask.sum(1).argmin())
    real = mask[row].bool()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    together = runner(**padded, position_ids=positions).logits[row][real]
    single = runner(input_ids=padded["input_ids"][row][real][None]).logits[0]
    assert (together - single).abs().max() <= allowed(single)
