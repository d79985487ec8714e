"""Programs of torch.export: the same outputs, in a process that has torch alone."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import headprune
from export_helpers import smaller
from headprune.errors import ExportError
from headprune.exports.runtime import RUNTIMES, Runtime, Source
from headprune.exports.sample_input import read_sample
from headprune.exports.torch_program import TorchProgram
from headprune.exports.torch_program.compiled import compiler
from headprune.exports.torch_program.int8 import Int8Linear, with_int8_weights
from headprune.tasks import task_of
from helpers import difference, outputs, pruned, real_tokens, telling_variant
from zoo import ZOO, text_batch

NAMES = ("bert", "vit", "llama-gqa", "t5")
STEPS = 20
PLAIN = TorchProgram(compiled=False)
# Nothing of what made the program may be needed to run it; torch does not bring numpy.
ALONE = "import sys\nfor name in ('headprune', 'transformers', 'torchao', 'numpy'):\n    sys.modules[name] = None\n"


def dense(name: str) -> Any:
    """As in the zoo, with two layers: one will be without heads. A layer is enough for the decoder of T5."""
    return smaller(ZOO[name].build, **({"num_decoder_layers": 1} if name == "t5" else {"num_hidden_layers": 2}))


def source_of(name: str) -> Source:
    model, _ = pruned(replace(ZOO[name], build=lambda: dense(name)), telling_variant(ZOO[name]))
    task = task_of(model)
    return Source(model, task, task.prepare(ZOO[name].batch(0), torch.device("cpu")))


def one_layer() -> Source:
    """A Llama of one layer, with a KV head less than the dense one."""
    config = copy.deepcopy(ZOO["llama-gqa"].build().config)
    config.num_hidden_layers = 1
    config.layer_types = None
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).eval()
    headprune.remove(model, headprune.resolve(model)[0].units()[0])
    return Source(model, task_of(model), ZOO["llama-gqa"].batch(0))


@functools.cache
def exported(name: str, quantize: str | None = None) -> tuple[Source, Path]:
    """Written once for all tests of a process."""
    source, folder = source_of(name), Path(tempfile.mkdtemp(prefix="headprune-torch-program-"))
    PLAIN.write(source, folder, quantize)
    return source, folder


@functools.cache
def opened(name: str) -> Any:
    return PLAIN.open(exported(name)[1])


def other_batch(name: str) -> dict[str, torch.Tensor]:
    """Of another size and of other lengths than the example that was traced."""
    if name == "vit":
        return {"pixel_values": ZOO[name].batch(3)["pixel_values"][:1]}
    batch = text_batch(3, size=5, length=13, left=name == "llama-gqa")
    if name == "t5":
        target = text_batch(4, size=5, length=4)
        batch |= {"decoder_input_ids": target["input_ids"], "decoder_attention_mask": target["attention_mask"]}
    return batch


def given(runner: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"logits": runner(**batch).logits}


def wanted(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"logits": outputs(model, batch)["logits"]}


def off(model: Any, runner: Any, batch: dict[str, torch.Tensor]) -> float:
    return difference(real_tokens(wanted(model, batch), batch), real_tokens(given(runner, batch), batch))


def greedy(model: Any, inputs: dict[str, torch.Tensor], steps: int = STEPS) -> list[int]:
    """What transformers writes, whatever the model says about where a text ends."""
    options = {"max_new_tokens": steps, "min_new_tokens": steps, "do_sample": False, "pad_token_id": 1}
    given, length = dict(inputs), inputs["input_ids"].shape[1]
    if "decoder_input_ids" in given:  # one token, with which the answer starts
        options["decoder_start_token_id"], length = int(given.pop("decoder_input_ids")), 1
    return model.generate(**given, **options, eos_token_id=None)[0, length:].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_the_model(name: str) -> None:
    source, runner = exported(name)[0], opened(name)
    for batch in (ZOO[name].batch(0), other_batch(name)):
        assert off(source.model, runner, batch) < 1e-5
    assert off(dense(name), runner, ZOO[name].batch(0)) > 1e-3, "a dense model would pass as well"


@pytest.mark.parametrize("name", ["llama-gqa", "t5"])
@pytest.mark.parametrize("length", [1, 3, 9])
def test_tokens_are_those_that_transformers_writes(name: str, length: int) -> None:
    source, _ = exported(name)
    inputs = text_batch(7, size=1, length=length)
    if name == "t5":
        inputs["decoder_input_ids"] = torch.tensor([[1]])
    assert opened(name).generate(inputs, STEPS) == greedy(source.model, inputs)


def alone(*codes: str) -> list[str]:
    """The last line that each of these prints, one after the other in one process."""
    code = "\nprint('---')\n".join([ALONE, *codes])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [part.splitlines()[-1] for part in done.stdout.split("---\n")[1:]]


def code_of(folder: Path, runtime: Runtime = PLAIN) -> str:
    return runtime.snippet(folder).replace("DIR", str(folder))


def test_the_code_for_people_runs_with_torch_alone() -> None:
    """It says what the model says: the code remembers keys and values by itself."""
    places = {name: exported(name) for name in NAMES}
    actual = dict(zip(NAMES, alone(*(code_of(folder) for _, folder in places.values())), strict=True))
    for name in ("bert", "vit"):
        assert actual[name].startswith("logits (1, 3) [")
    for name in ("llama-gqa", "t5"):
        source, folder = places[name]
        sample = dict(read_sample(folder))
        if name == "t5":
            sample = {**sample, "decoder_input_ids": sample["decoder_input_ids"][:, :1]}
            sample.pop("decoder_attention_mask")
        start = sample.get("decoder_input_ids", sample["input_ids"])
        assert actual[name] == str(start[0].tolist() + greedy(source.model, sample))


def test_files_hold_no_row_of_the_data() -> None:
    _, folder = exported("bert")
    assert torch.export.load(folder / "model.pt2").example_inputs is None


def test_weights_in_int8_are_a_quarter_and_compute_what_they_say() -> None:
    source, folder = exported("bert", "int8")
    small = with_int8_weights(source.model)
    batch, runner = other_batch("bert"), PLAIN.open(folder)
    assert off(small, runner, batch) < 1e-5
    program = torch.export.load(folder / "model.pt2")
    kinds = {name: tensor.dtype for name, tensor in program.state_dict.items() if name.endswith("query.weight")}
    assert set(kinds.values()) == {torch.int8}
    assert 0 < off(source.model, runner, batch) < 0.1


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_int8_is_half_a_step_away_at_most(name: str) -> None:
    """Closed form: rounding to the nearest of 255 steps; linear maps of both layouts, with their bias."""
    model = ZOO[name].build()
    small = with_int8_weights(model)
    seen = 0
    for path, module in small.named_modules():
        if isinstance(module, Int8Linear):
            dense = model.get_submodule(path)
            weight = dense.weight.t() if name == "gpt2" else dense.weight
            worst = (module.weight * module.scale[:, None] - weight).abs().amax(1)
            assert (worst <= weight.abs().amax(1) / 127 / 2 * 1.0001).all()
            states = torch.randn(2, 3, weight.shape[1])
            exact = states.double() @ (module.weight.double() * module.scale.double()[:, None]).t()
            exact = exact if module.bias is None else exact + module.bias
            torch.testing.assert_close(module(states).double(), exact, atol=1e-5, rtol=1e-5)
            seen += 1
    assert seen > 5
    assert all(not isinstance(module, Int8Linear) for module in model.modules()), "the model itself was changed"


def test_tied_weights_are_stored_once() -> None:
    source = source_of("gpt2")
    with tempfile.TemporaryDirectory() as place:
        PLAIN.write(source, Path(place), None)
        program = torch.export.load(Path(place) / "model.pt2")
        stored = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in program.state_dict.values()}
        assert sum(stored.values()) == sum(tensor.nbytes for tensor in source.model.parameters())


def test_a_folder_without_its_programs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"programs\.json is missing or damaged; export the model again"):
        PLAIN.open(tmp_path)
    (tmp_path / "programs.json").write_text('{"model": {"input_ids": [null, null]}}')
    with pytest.raises(ExportError, match=r"model.pt2 is missing; export the model again"):
        PLAIN.open(tmp_path)


def test_what_cannot_be_traced_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of("bert")
    forward = type(source.model).forward

    def depends(self: Any, *args: Any, **kwargs: Any) -> Any:
        actual = forward(self, *args, **kwargs)
        if actual.logits.sum().item() > 0:  # a value decides what is computed
            actual.logits = -actual.logits
        return actual

    monkeypatch.setattr(type(source.model), "forward", depends)
    with pytest.raises(ExportError, match=r"PyTorch cannot trace this model \(.*\); save it with headprune.save"):
        PLAIN.write(source, tmp_path, None)


def test_no_compiler_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headprune.exports.torch_program.compiled.compiler", lambda: None)
    source = source_of("vit")
    TorchProgram().write(source, tmp_path, None)
    assert not list(tmp_path.glob("*.aoti.pt2"))
    assert off(source.model, TorchProgram().open(tmp_path), other_batch("vit")) < 1e-5


def test_a_compiler_that_fails_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headprune.exports.torch_program.compiled.compiler", lambda: "c++")

    def broken(program: Any, *, package_path: str, inductor_configs: Any) -> None:
        Path(package_path).write_text("half")
        raise RuntimeError("the compiler\nfell over")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", broken)
    source = source_of("vit")
    with pytest.warns(UserWarning, match=r"model.aoti.pt2 was not written.*RuntimeError: the compiler fell over"):
        TorchProgram().write(source, tmp_path, None)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.pt2", "programs.json", "sample.npz"]


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
def test_compiled_programs_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
    runtime = RUNTIMES["torch"]
    source = one_layer()  # each layer takes many seconds to compile
    runtime.write(source, tmp_path, None)
    assert (tmp_path / "model.aoti.pt2").is_file()
    runner = runtime.open(tmp_path, threads=1)
    for batch in (ZOO["llama-gqa"].batch(0), other_batch("llama-gqa")):
        assert off(source.model, runner, batch) < 1e-5
    for length in (1, 5):
        inputs = text_batch(7, size=1, length=length)
        assert runner.generate(inputs, STEPS) == greedy(source.model, inputs)
    code = code_of(tmp_path, runtime)
    assert "aoti_load_package" in code
    (tmp_path / "model.pt2").unlink()  # what is left of it is the compiled code
    ids = read_sample(tmp_path)["input_ids"]
    expected = ids[0].tolist() + greedy(source.model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert alone(code) == [str(expected)]
