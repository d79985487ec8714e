"""`headprune reproduce gates`: a model of a few thousand parameters that translates a made-up language."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import headprune
from headprune.batches import IGNORED
from headprune.cli.main import app
from headprune.errors import HeadpruneError
from headprune.papers import ReproductionError, translation_gates
from headprune.papers.all_attention.training import Optimizing, train_on
from headprune.papers.translation_gates import (
    END,
    FIRST,
    START,
    TYPES,
    Language,
    Settings,
    Study,
    attention_type,
    build,
    exact_matches,
    kept_by_type,
)

SMALL = Settings(layers=1, heads=4, hidden=16, feed_forward=16, letters=4, longest=6, batch=8, sentences=40)
CALL = ["reproduce", "gates", "--scale", "0.01", "--seeds", "3,4", "--json"]
NAMES = ["dense", "trained on"]
NAMES += [f"{way} keep={keep}" for keep in (0.5, 0.25) for way in ("gates", "voita", "his")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A reproduction from start to end: its directory and what the program printed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translation_gates, "Settings", lambda: SMALL)
        result = CliRunner().invoke(app, [*CALL, "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out, result


def rows_of(out: Path, seed: int) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads((out / f"seed-{seed}" / "rows.json").read_text())["rows"]}


def test_the_files_and_rows_of_a_reproduction(whole: tuple[Path, Any]) -> None:
    out, result = whole
    said = json.loads(result.stdout)
    assert {Path(file).name for file in said["files"]} == {"results.json", "table1.md", "table1.csv"}
    results = json.loads((out / "results.json").read_text())
    assert said["rows"] == results["rows"]
    assert [row["name"] for row in results["rows"]] == NAMES
    assert results["seeds"] == [3, 4]
    heads = 3 * SMALL.layers * SMALL.heads
    by_seed = [rows_of(out, seed) for seed in (3, 4)]
    for row in results["rows"]:
        keep = float(row["name"].partition("keep=")[2] or 1)
        assert row["heads"] == max(1, round(keep * heads))
        values = [100 * rows[row["name"]]["exact"] for rows in by_seed]
        assert row["exact"]["mean"] == pytest.approx(statistics.mean(values), abs=1e-5)
        assert row["exact"]["deviation"] == pytest.approx(statistics.stdev(values), abs=1e-5)
        for key in TYPES:
            counts = [sum(rows[row["name"]]["kept"][key]) for rows in by_seed]
            assert row["kept"][key]["values"] == counts
        assert ("exact_before_tuning" in row) == (row["name"] not in ("dense", "trained on"))


def test_his_removes_the_lowest_scores_of_the_model_before_removal(whole: tuple[Path, Any]) -> None:
    out, _ = whole
    settings = dataclasses.replace(SMALL, seed=3)
    model = headprune.load(out / "seed-3" / "models" / "before-removal")
    batches = list(Language(settings).batches(32, settings.batch, settings.seed + 3))
    assert len(batches) * settings.batch == settings.calibration
    result = headprune.score(model, batches, criterion="his")
    order = result.scores.flatten().argsort(descending=True).tolist()
    kept: dict[str, int] = dict.fromkeys(TYPES, 0)
    for index in order[:6]:
        kept[attention_type(result.sites[index // settings.heads].path)] += 1
    assert {key: sum(counts) for key, counts in rows_of(out, 3)["his keep=0.5"]["kept"].items()} == kept


def test_finished_rows_are_not_made_again(whole: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    out, _ = whole
    before = (out / "results.json").read_bytes()
    monkeypatch.setattr(Study, "_make", lambda self, name: pytest.fail(f"{name} is made again"))
    monkeypatch.setattr(translation_gates, "Settings", lambda: SMALL)
    assert CliRunner().invoke(app, [*CALL, "--out", str(out)]).exit_code == 0
    assert (out / "results.json").read_bytes() == before
    with pytest.raises(ReproductionError, match=r"other settings: scale was 0\.01 and is now 0\.02"):
        translation_gates.reproduce_gates(out, scale=0.02, seeds=(3,), settings=SMALL)


def test_going_on_after_an_interruption_gives_the_same(
    whole: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = whole
    make = Study._make

    def stopping(self: Study, name: str) -> dict[str, Any]:
        if name == "voita keep=0.5":
            raise KeyboardInterrupt
        return make(self, name)

    monkeypatch.setattr(translation_gates, "Settings", lambda: SMALL)
    monkeypatch.setattr(Study, "_make", stopping)
    call = ["reproduce", "gates", "--scale", "0.01", "--seeds", "4", "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, call).exit_code == 130
    monkeypatch.setattr(Study, "_make", make)
    assert CliRunner().invoke(app, call).exit_code == 0
    assert rows_of(tmp_path / "out", 4) == rows_of(out, 4)


BAD = {
    "no scale": (["--scale", "0"], "--scale multiplies the steps and must be above 0"),
    "no seed": (["--seeds", "-1"], "A seed must be 0 or more, but --seeds has -1."),
    "a seed twice": (["--seeds", "1,1"], "--seeds needs one or more different numbers"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, tmp_path: Path) -> None:
    options, sentence = BAD[case]
    result = CliRunner().invoke(app, ["reproduce", "gates", "--out", str(tmp_path / "out"), *options])
    assert isinstance(result.exception, HeadpruneError)  # which `main` prints, with exit code 2
    assert sentence in str(result.exception)
    assert not (tmp_path / "out").exists()


# --- its parts ---


def test_a_translation_by_hand() -> None:
    settings = Settings(letters=4)
    language = Language(settings)
    first, second = language.tables.tolist()
    assert sorted(first) == sorted(second) == [0, 1, 2, 3]
    # Letters 2 and 3 are of the second half: what follows them takes the second table.
    letters = torch.tensor([3, 0, 2, 2, 1])
    expected = [first[3], second[0], first[2], second[2], second[1]]
    assert language.translation(letters).tolist() == expected[::-1]
    for batch in language.batches(2, 16, 0):
        for source, target in zip(batch["input_ids"], batch["labels"], strict=True):
            length = int((source == END).nonzero())
            letters = source[:length] - FIRST
            assert settings.shortest <= length <= settings.longest
            translated = target[:length] - FIRST - settings.letters
            assert torch.equal(translated, language.translation(letters))
            assert target[length] == END
            assert (target[length + 1 :] == IGNORED).all()


def test_exact_matches_are_those_of_greedy_decoding() -> None:
    """Of a model that has learned a part of the language, token by token from what it said before."""
    torch.manual_seed(0)
    settings = Settings(layers=1, heads=2, hidden=32, letters=2, shortest=1, longest=4, batch=32)
    language, model = Language(settings), build(settings)
    train_on(model, language.batches(60, 32, 0), Optimizing(1e-2, 0, 60), seed=0)
    (batch,) = language.batches(1, 60, 1)
    right = exact_matches(model, [batch])
    said = torch.full((60, 1), START)
    with torch.no_grad():
        for _ in range(settings.longest + 1):
            inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
            logits = model(**inputs, decoder_input_ids=said).logits
            said = torch.cat([said, logits[:, -1:].argmax(-1)], 1)
    for row, words in enumerate(batch["labels"]):
        target = words[words != IGNORED]
        assert bool(right[row]) == torch.equal(said[row, 1 : len(target) + 1], target)
    assert 0 < right.sum() < 60


def test_types_of_attention() -> None:
    model = build(SMALL)
    assert kept_by_type(model) == {"encoder": [4], "decoder": [4], "cross": [4]}
    headprune.remove(model, [(site.index, 0) for site in headprune.resolve(model) if "encoder_attn" in site.path])
    assert kept_by_type(model) == {"encoder": [4], "decoder": [4], "cross": [3]}
