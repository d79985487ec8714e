"""The demo's data and the pieces it is made of; the whole of it is `make demo`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from headprune.data import load_examples
from headprune.data.sources import read_table
from headprune.errors import MissingPackageError
from headprune.papers import langid
from runs import classifier, material

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
