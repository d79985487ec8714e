"""An export is there only when it is right: what is checked, what is refused, and what is left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headprune
import llamas
from export_helpers import batches, program, uneven
from headprune.errors import ExportError, MissingPackageError
from headprune.exports import export_model
from headprune.exports.check_outputs import prompt_of
from headprune.exports.export_model import RECORD, dummy_batches, export, runtime_of, source_of
from headprune.exports.onnx import write
from headprune.exports.onnx.run import open_folder
from headprune.exports.programs import programs_of
from headprune.exports.runtime import RUNTIMES, Runner, Runtime, Source
from headprune.tasks import task_of
from helpers import contents
from zoo import ZOO


class Fake(Runner):
    """The model itself, with what is said changed."""

    def __init__(self, model: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.model, self.change = model, change
        self.closed = False

    def __call__(self, **inputs: Any) -> Any:
        with torch.no_grad():
            output = self.model(**inputs)
        output.logits = self.change(output.logits)
        return output

    def generate(self, inputs: Any, tokens: int) -> list[int]:
        every = inputs["input_ids"]
        for _ in range(tokens):
            every = torch.cat([every, self(input_ids=every, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        return every[0, -tokens:].tolist()

    def close(self) -> None:
        self.closed = True


class FakeRuntime(Runtime):
    name, title, extra, modules, quantizations, install = "fake", "Fake", "", ("torch",), ("int8",), "torch"

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits) -> None:
        self.change = change
        self.runners: list[Fake] = []

    def refuse(self, source: Source) -> None:
        pass

    def write(self, source: Source, folder: Path, quantize: str | None) -> None:
        (folder / "model.fake").write_text(str(quantize))

    def open(self, folder: Path, source: Source | None = None, *, threads: int | None = None) -> Runner:
        assert source is not None
        assert (folder / "model.fake").is_file()
        self.runners.append(Fake(source.model, self.change))
        return self.runners[-1]

    def snippet(self, folder: Path) -> str:
        return 'print(open("DIR/model.fake").read())\n'


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRuntime]:
    def make(change: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits) -> FakeRuntime:
        monkeypatch.setitem(RUNTIMES, "fake", FakeRuntime(change))
        return RUNTIMES["fake"]  # type: ignore[return-value]

    return make


def labelled() -> list[dict[str, torch.Tensor]]:
    """Batches whose labels are what the model says, so that its accuracy is 1."""
    model = uneven("bert")
    actual = []
    for batch in batches("bert"):
        with torch.no_grad():
            actual.append({**batch, "labels": model(**batch).logits.argmax(-1)})
    return actual


def test_what_is_written_down(fake: Callable[..., FakeRuntime], tmp_path: Path) -> None:
    made = fake(lambda logits: logits + 1e-6)
    record = export(uneven("bert"), tmp_path / "out", labelled(), to="fake", dense=ZOO["bert"].build())
    assert record == json.loads((tmp_path / "out" / RECORD).read_text())
    checked = record["check"]
    assert checked["samples"] == 4
    assert 0 < checked["difference"] < 3e-6
    assert (checked["metric"], checked["exported"]["value"], checked["pytorch"]["value"]) == ("accuracy", 1.0, 1.0)
    assert set(record["latency"]) == {"threads", "repeats", "batch_1", "batch_3"}
    assert all(record["latency"]["batch_1"][name] > 0 for name in ("dense", "pruned", "speedup"))
    assert all(runner.closed for runner in made.runners)
    assert len(made.runners) == 2
    assert program(tmp_path / "out").strip() == "None"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda logits: logits + 1e-2, r"differ from PyTorch's by up to 0\.\d+ of their size \(allowed: 0\.0001\)"),
        (lambda logits: logits * torch.nan, "outputs are NaN or Inf"),
        (lambda logits: logits[:, :2], r"the shape \[3, 2\] and not \[3, 3\]"),
    ],
)
def test_a_wrong_export_leaves_nothing(
    change: Any, reason: str, fake: Callable[..., FakeRuntime], tmp_path: Path
) -> None:
    made = fake(change)
    with pytest.raises(ExportError, match=reason):
        export(uneven("bert"), tmp_path / "out", batches("bert"), to="fake")
    assert list(tmp_path.iterdir()) == []
    assert made.runners[0].closed


def test_a_wrong_export_leaves_the_old_one(fake: Callable[..., FakeRuntime], tmp_path: Path) -> None:
    fake()
    export(uneven("bert"), tmp_path / "out", batches("bert"), to="fake")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    fake(lambda logits: logits + 1)
    with pytest.raises(ExportError):
        export(uneven("bert"), tmp_path / "out", batches("bert"), to="fake", quantize=None)
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_quantised_models_are_checked_by_their_metric(fake: Callable[..., FakeRuntime], tmp_path: Path) -> None:
    """All four samples right: Wilson's interval begins at 4 / (4 + 1.96 ** 2) = 0.51, so one may be wrong."""

    def spoiled(rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def change(logits: torch.Tensor) -> torch.Tensor:
            return torch.cat([-logits[:rows], logits[rows:]]) if len(logits) == 3 else logits

        return change

    fake(spoiled(1))
    record = export(uneven("bert"), tmp_path / "one", labelled(), to="fake", quantize="int8")
    assert record["check"]["exported"]["value"] == 0.75
    assert record["check"]["tolerance"] is None
    assert (tmp_path / "one" / "model.fake").read_text() == "int8"
    fake(spoiled(3))
    with pytest.raises(
        ExportError, match=r"accuracy in Fake is 0\.25 and not 1, a drop of 0\.75 where 0\.49 is allowed"
    ):
        export(uneven("bert"), tmp_path / "three", labelled(), to="fake", quantize="int8")
    fake(spoiled(1))
    with pytest.raises(ExportError, match=r"a drop of 0\.25 where 0\.1 is allowed \(--max-drop\)"):
        export(uneven("bert"), tmp_path / "three", labelled(), to="fake", quantize="int8", max_drop=0.1)
    fake(spoiled(3))
    export(uneven("bert"), tmp_path / "three", labelled(), to="fake", quantize="int8", max_drop=0.8)


def test_another_text_is_refused(fake: Callable[..., FakeRuntime], tmp_path: Path) -> None:
    """Outputs of one pass agree, and what is remembered of earlier tokens is wrong."""

    class Forgetful(Fake):
        def generate(self, inputs: Any, tokens: int) -> list[int]:
            right = super().generate(inputs, tokens)
            return [*right[:5], *((token + 1) % 61 for token in right[5:])]

    made = fake()
    made.open = lambda folder, source=None, threads=None: Forgetful(source.model, lambda x: x)  # type: ignore
    with pytest.raises(ExportError, match="generated text differs from PyTorch's after 5 tokens"):
        export(uneven("gpt2"), tmp_path / "out", batches("gpt2"), to="fake")
    assert list(tmp_path.iterdir()) == []


def test_bad_requests(fake: Callable[..., FakeRuntime], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake()
    model = uneven("bert")
    with pytest.raises(ExportError, match="no runtime 'tensorrt'; choose one of fake, gguf, onnx, openvino, torch"):
        export(model, tmp_path / "out", batches("bert"), to="tensorrt")
    with pytest.raises(ExportError, match="Fake has no quantisation 'q4_0' here; choose int8"):
        export(model, tmp_path / "out", batches("bert"), to="fake", quantize="q4_0")
    with pytest.raises(ExportError, match="give at least one batch"):
        export(model, tmp_path / "out", [], to="fake")
    with pytest.raises(ExportError, match=r"dtype=torch\.float32"):
        export(uneven("bert").half(), tmp_path / "out", batches("bert"), to="fake")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    for record in (None, '{"files": ["thesis.txt", "export.json"], "versions": {"another program": "1"}}'):
        if record is not None:
            (tmp_path / "full" / "export.json").write_text(record)
        before = contents(tmp_path)
        with pytest.raises(ExportError, match="holds something that is not an export"):
            export(model, tmp_path / "full", batches("bert"), to="fake")
        assert contents(tmp_path) == before
    monkeypatch.setattr(export_model, "need", _missing)
    with pytest.raises(MissingPackageError, match=r"headprune\[onnx\]"):
        runtime_of("onnx", None)


def _missing(modules: tuple[str, ...], extra: str, who: str) -> None:
    raise MissingPackageError(f"{who} {modules[0]}; install it with pip install 'headprune[{extra}]'.")


@pytest.mark.parametrize(("name", "form"), [("gpt2", "causal"), ("t5", "seq2seq"), ("vit", "plain")])
def test_dummy_inputs_stand_in_for_data(name: str, form: str) -> None:
    """Of several sizes, all tensors, and enough to make a program with a KV cache of."""
    model = ZOO[name].build()
    first, second = dummy_batches(model)
    assert [len(first[model.main_input_name]), len(second[model.main_input_name])] == [3, 2]
    assert all(isinstance(value, torch.Tensor) for value in (*first.values(), *second.values()))
    assert programs_of(source_of(model, [first, second])).form == form


def test_the_sample_is_made_up(tmp_path: Path) -> None:
    """Nothing of the data that an export was checked on travels with it."""
    from headprune.exports.sample_input import sample_inputs

    model = uneven("bert")
    secret = {**ZOO["bert"].batch(9)}
    given = Source(model, task_of(model), secret)
    actual = sample_inputs(given)
    assert set(actual) == {"input_ids", "attention_mask"}
    assert actual["input_ids"].shape == (1, 9)
    assert not torch.equal(actual["input_ids"], secret["input_ids"][:1])
    assert torch.equal(actual["input_ids"], sample_inputs(given)["input_ids"])


def test_headprune_export_is_public(fake: Callable[..., FakeRuntime], tmp_path: Path) -> None:
    fake()
    assert headprune.export(uneven("bert"), tmp_path / "out", batches("bert"), to="fake")["runtime"] == "fake"


def test_llama_cpp_is_checked_by_log_probabilities(tmp_path: Path) -> None:
    """Through the whole of an export: float as near as it has to be, and quantised by the perplexity."""
    given = llamas.source_of(llamas.pruned("qwen2", "first-without-heads"), tmp_path / "model")
    options = {"dense": llamas.built("qwen2", llamas.tokenizer()), "tokenizer": given.folder, "to": "gguf"}
    record = export(given.model, tmp_path / "float", [given.batch], **options)  # type: ignore[arg-type]
    checked = record["check"]
    assert (checked["metric"], checked["tokens"]) == ("perplexity", 20)
    assert checked["difference"] <= checked["tolerance"] == 0.01
    assert checked["exported"]["value"] == pytest.approx(checked["pytorch"]["value"], rel=1e-3)
    assert set(record["latency"]) == {"threads", "repeats", "generate_20"}
    small = export(given.model, tmp_path / "small", [given.batch], quantize="q8_0", **options)  # type: ignore[arg-type]
    assert small["check"]["tolerance"] is None
    assert small["check"]["difference"] > checked["difference"]
    assert program(tmp_path / "float")


def test_a_model_that_is_broken_in_pytorch_is_no_reference(fake: Callable[..., FakeRuntime], tmp_path: Path) -> None:
    model = uneven("bert")
    with torch.no_grad():
        model.classifier.bias.fill_(torch.nan)
    fake(lambda logits: torch.full_like(logits, 123.0))
    with pytest.raises(ExportError, match="in PyTorch already"):
        export(model, tmp_path / "out", batches("bert"), to="fake")


def test_prompts_have_tokens_and_leave_room_for_more() -> None:
    """GPT-2 of the zoo has 40 positions; the first row is padding alone."""
    ids = torch.randint(5, 60, (3, 35), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0] = 0
    model = uneven("gpt2")
    prompt = prompt_of(Source(model, task_of(model), {"input_ids": ids, "attention_mask": mask}))
    assert torch.equal(prompt["input_ids"], ids[1:2, :20])


def test_tied_tokens_may_come_either_way(fake: Callable[..., FakeRuntime], tmp_path: Path) -> None:
    """The best token and one that is made equal to it: the runner takes the other one, and both go on from there."""
    model = uneven("gpt2")
    with torch.no_grad():
        model.lm_head.weight[7] = model.lm_head.weight[9]

    class Other(Fake):
        def generate(self, inputs: Any, tokens: int) -> list[int]:
            every = inputs["input_ids"]
            for _ in range(tokens):
                best = int(self(input_ids=every, use_cache=False).logits[0, -1].argmax())
                every = torch.cat([every, torch.tensor([[{7: 9, 9: 7}.get(best, best)]])], dim=1)
            return every[0, -tokens:].tolist()

    made = fake()
    made.open = lambda folder, source=None, threads=None: Other(source.model, lambda x: x)  # type: ignore
    assert export(model, tmp_path / "out", batches("gpt2"), to="fake")["check"]["tokens"] == 20


def test_what_else_lies_in_the_folder_stays(fake: Callable[..., FakeRuntime], tmp_path: Path) -> None:
    fake()
    export(uneven("bert"), tmp_path / "out", batches("bert"), to="fake")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "out" / "model.fake").write_text("old")
    export(uneven("bert"), tmp_path / "out", batches("bert"), to="fake")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "out" / "model.fake").read_text() == "None"


def test_large_files_and_what_they_do_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights in a file of their own, smaller in int8; and nothing of the machine that they were made on."""
    model = uneven("bert", num_hidden_layers=2)
    given = Source(model, task_of(model), batches("bert")[0])
    monkeypatch.setattr(write, "LARGEST", 1000)
    for name, quantize in (("float", None), ("small", "int8")):
        (tmp_path / name).mkdir()
        write.write_programs(programs_of(given), tmp_path / name, quantize)
    sizes = [(tmp_path / name / "model.onnx.data").stat().st_size for name in ("float", "small")]
    assert sizes[1] < sizes[0]
    content = (tmp_path / "float" / "model.onnx").read_bytes()
    assert b"/site-packages/" not in content
    assert str(Path(headprune.__file__).parent).encode() not in content
    with torch.no_grad():
        expected = model(**batches("bert")[0]).logits
    assert (open_folder(tmp_path / "float", threads=1)(**batches("bert")[0]).logits - expected).abs().max() < 1e-5


def test_a_decoder_that_takes_more_than_tokens(tmp_path: Path) -> None:
    """Without a cache, and without a text to compare: what token types new tokens have, nobody says."""
    rows = [{**batch, "token_type_ids": torch.zeros_like(batch["input_ids"])} for batch in batches("gpt2")]
    record = export(uneven("gpt2", num_hidden_layers=2), tmp_path / "out", rows, to="onnx")
    assert (record["form"], record["check"]["tokens"]) == ("plain", None)
    assert record["check"]["difference"] < 1e-5
