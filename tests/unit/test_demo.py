"""The demo's data and its parts on a small model; the whole of it is `make demo`."""

from __future__ import annotations

import io
import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from transformers import AutoTokenizer

import headprune
from headprune.cli.demo import compare_with_random, make_fast, run_without_headprune, show_plain_loading
from headprune.cli.main import app
from headprune.config.option import values_of
from headprune.data import load_examples
from headprune.data.tables import read_table
from headprune.errors import CheckpointError, MissingPackageError
from headprune.papers import langid
from headprune.runs.experiment import Experiment, settings_of
from run_helpers import classifier, material

NEEDS_DJANGO = "the demo's data comes with it"


@pytest.fixture(scope="module")
def strings() -> list[tuple[str, str, str]]:
    pytest.importorskip("django", reason=NEEDS_DJANGO)
    return langid.catalogue_strings()


def test_all_twenty_languages_are_there(strings: list[tuple[str, str, str]]) -> None:
    assert len(langid.LANGUAGES) == len(set(langid.LANGUAGES)) == 20
    counts = Counter(language for _, language, _ in strings)
    assert counts.keys() == set(langid.LANGUAGES)
    assert min(counts.values()) >= 50
    assert len(strings) >= 5000


def test_strings_are_clean(strings: list[tuple[str, str, str]]) -> None:
    assert strings == sorted(set(strings))
    for original, language, text in strings:
        assert len(text) >= langid.SHORTEST
        assert text == " ".join(text.split())  # no tabs or line ends, which would break the table
        assert language == "en" or text != " ".join(original.split())  # what was not translated is English


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("django", reason=NEEDS_DJANGO)
    return langid.prepare_data(tmp_path_factory.mktemp("demo") / "data")


def test_no_original_is_on_both_sides(strings: list[tuple[str, str, str]], data: Path) -> None:
    """Otherwise the model could know a dev string by its translation."""
    originals: dict[tuple[str, str], set[str]] = {}
    for original, language, text in strings:
        originals.setdefault((text, language), set()).add(original)
    sides = {}
    for name in ("train", "dev"):
        table = read_table(data / f"{name}.tsv")
        rows = list(zip(table["text"], table["label"], strict=True))
        assert all(row in originals for row in rows)
        assert set(table["label"]) == set(langid.LANGUAGES)
        sides[name] = rows
    total = len(sides["train"]) + len(sides["dev"])
    assert 0.99 * len(strings) < total <= len(strings)
    assert 0.1 < len(sides["dev"]) / len(strings) < 0.2
    # A string with one original tells which side that is on; these must not meet.
    known = {
        name: {o for row in rows for o in originals[row] if len(originals[row]) == 1} for name, rows in sides.items()
    }
    assert known["train"].isdisjoint(known["dev"])


def test_no_string_is_on_both_sides(data: Path) -> None:
    """Two originals can have one translation: it must not be learnt on one side and asked for on the other."""
    train, dev = (read_table(data / f"{name}.tsv") for name in ("train", "dev"))
    both = set(zip(train["text"], train["label"], strict=True)) & set(zip(dev["text"], dev["label"], strict=True))
    assert both == set()


def test_the_data_is_the_same_every_time_and_made_once(data: Path, tmp_path: Path) -> None:
    again = langid.prepare_data(tmp_path / "data")
    for name in ("train.tsv", "dev.tsv"):
        assert (again / name).read_bytes() == (data / name).read_bytes()
    (again / "dev.tsv").write_text("text\tlabel\nkept\ten\n")
    langid.prepare_data(again)
    assert (again / "dev.tsv").read_text() == "text\tlabel\nkept\ten\n"


def test_a_missing_package_is_named() -> None:
    with pytest.raises(
        MissingPackageError, match=r"needs no_such_module; install it with pip install 'headprune\[demo\]'"
    ):
        langid.package_folder("no_such_module")


def test_fine_tuning_learns_and_leaves_the_embeddings() -> None:
    m = material()
    model: Any = classifier()
    examples = load_examples(model, m.data_csv, processor=m.bert)
    batches = examples.batches(36)
    before = model.bert.embeddings.word_embeddings.weight.clone()
    weights = model.bert.encoder.layer[0].attention.self.query.weight.clone()
    with torch.no_grad():
        untrained = float(model(**batches[0]).loss)
    torch.manual_seed(0)
    for _ in range(8):
        langid.fine_tune(model, examples)
    with torch.no_grad():
        assert float(model(**batches[0]).loss) < untrained
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, before)
    assert not torch.equal(model.bert.encoder.layer[0].attention.self.query.weight, weights)
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())


def experiment(**options: Any) -> Experiment:
    files = material()
    return Experiment(model=files.bert, data=files.data_csv, batch_size=4, calibration_samples=8, **options)


def test_the_curves_are_those_of_the_runs(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    rows = compare_with_random(experiment(evaluation_samples=12), tmp_path, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert sorted(row.name for row in rows) == ["random+none", "residual-gradient"]
    counts = {row.name: row.removable["5%"] for row in rows}
    assert f"{counts['residual-gradient']} of 12 heads can be removed" in text
    assert f"at random {counts['random+none']}." in text
    assert (tmp_path / "report.html").is_file()


def test_the_fast_model_is_said_as_its_run_has_it(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=200)
    record = make_fast(experiment(evaluation_samples=12, rounds=1), tmp_path / "fast", console, speedup=1.05)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    left = record["savings"]["shares"]["latency"]
    assert f"{1 / left:.2f} times as fast" in text
    assert f"Accuracy {record['result']['dense']:.2%} [" in text
    assert f", {record['result']['pruned']:.2%} [" in text
    assert (tmp_path / "fast" / "model" / "model.safetensors").is_file()


def test_the_printed_command_has_the_settings_of_the_run(tmp_path: Path) -> None:
    """Typed, it resumes the run or makes the same one; it once left out all but the model, the data and the budget."""
    console = Console(file=io.StringIO(), width=80)
    other = experiment(calibration=material().data_csv, evaluation_samples=12, rounds=1, max_length=64, seed=3)
    out = tmp_path / "the fast one"
    record = make_fast(other, out, console, speedup=1.05)
    (printed,) = (line for line in console.file.getvalue().splitlines() if "headprune prune" in line)  # type: ignore[attr-defined]
    program, verb, *words = shlex.split(printed)
    command: Any = typer.main.get_command(app)
    parsed = command.commands[verb].make_context(verb, words).params
    assert (program, verb, parsed["out"]) == ("headprune", "prune", out)
    typed = Experiment(**values_of(Experiment, parsed))
    assert settings_of(typed) == record["settings"]


def test_plain_transformers_runs_what_the_demo_shows(tmp_path: Path) -> None:
    model: Any = classifier()
    headprune.remove(model, [(0, 1), (1, 0), (1, 2)])  # layers of different width
    headprune.save(model, tmp_path, processor=AutoTokenizer.from_pretrained(material().bert))
    console = Console(file=io.StringIO(), width=200)
    printed = show_plain_loading(tmp_path, "sequence-classification", console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "trust_remote_code=True" in text
    assert "the folder carries the" in text
    (answer,) = json.loads(printed.replace("'", '"'))
    inputs = AutoTokenizer.from_pretrained(material().bert)("What a lovely day.", return_tensors="pt")
    with torch.no_grad():
        shares = model(**inputs).logits.softmax(-1)[0]
    assert answer["label"] == model.config.id2label[int(shares.argmax())]
    assert answer["score"] == pytest.approx(float(shares.max()), abs=1e-4)


def test_the_fresh_process_has_no_headprune() -> None:
    assert run_without_headprune("print(1)\nprint(2)") == "2"
    with pytest.raises(CheckpointError, match="headprune"):
        run_without_headprune("import headprune")
