"""`headprune reproduce all-attention`, with models of a few thousand parameters."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import headprune
from headprune.cli.main import app
from headprune.errors import HeadpruneError
from headprune.papers import ReproductionError, all_attention
from headprune.papers.all_attention import reproduce_all_attention, study
from headprune.papers.all_attention.plan import TECHNIQUES, TITLES, Settings, build, rows_of
from headprune.papers.all_attention.study import outside_embeddings
from headprune.papers.all_attention.text import VOCABULARY, read_text
from headprune.papers.all_attention.training import share, train, window_losses
from pictures import drawing

SMALL = Settings(layers=2, heads=5, hidden=20, persistent=12, context=16, batch=4, windows=20)
CALL = ["reproduce", "all-attention", "--scale", "0.01", "--seed", "3", "--json"]
ROWS = 2 * (2 + 3 + 1) + 3


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_attention, "DEFAULTS", SMALL)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "small.txt"
    path.write_text("".join(f"{n} is followed by {n + 1}.\n" for n in range(200)))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> tuple[Path, Any]:
    """A reproduction from start to end: its directory and what the program printed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_attention, "DEFAULTS", SMALL)
        result = CliRunner().invoke(app, [*CALL, "--data", str(text_file), "--out", str(out)])
    assert result.exit_code == 0, result.output
    return out, result


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def by_name(out: Path) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in results(out)["rows"]}


def test_the_files_of_a_reproduction(whole: tuple[Path, Any], text_file: Path) -> None:
    out, result = whole
    said = json.loads(result.stdout)
    names = {"results.json", "table1.md", "table1.csv", "table2.md", "table2.csv"}
    names |= {f"figures/figure1.{form}" for form in ("png", "svg", "pdf")}
    assert {str(Path(file).relative_to(out)) for file in said["files"]} == names
    actual = results(out)
    assert said["rows"] == actual["rows"]
    assert actual["settings"] == json.loads(json.dumps(SMALL.to_json())) | {
        "seed": 3,
        "scale": 0.01,
        "dense_steps": max(2, round(0.01 * SMALL.dense_steps)),
        "gate_steps": max(2, round(0.01 * SMALL.gate_steps)),
        "tuning_steps": max(2, round(0.01 * SMALL.tuning_steps)),
        "windows": 2,
    }
    assert actual["text"]["name"] == "small.txt"
    assert actual["text"]["training_bytes"] + actual["text"]["validation_bytes"] == text_file.stat().st_size
    for part in ("15 of 15", "Transformer, heads only", "40.0 % fewer heads"):
        assert part in result.stderr
    shown = drawing(out / "figures", "figure1")
    assert {*TITLES.values(), "Lines join models that have had the same steps. Text: small.txt."} <= set(shown.texts)
    pattern = r"Parameters outside embeddings: ([\d.]+)k; .*: ([\d.]+); model: (.+); kind: .+"
    points = [match.groups() for label in shown.labels if (match := re.fullmatch(pattern, label))]
    assert sorted((round(1000 * float(size)), round(float(loss), 9), title) for size, loss, title in points) == sorted(
        (row["parameters"], round(row["loss"], 9), TITLES[row["model"]]) for row in actual["rows"]
    )


def test_every_row_is_what_its_model_is(whole: tuple[Path, Any], text_file: Path) -> None:
    """Parameters, heads and losses are those of the checkpoints; shares are what was asked for."""
    out, _ = whole
    rows = by_name(out)
    settings = Settings(**{k: tuple(v) if isinstance(v, list) else v for k, v in results(out)["settings"].items()})
    assert list(rows) == [row.name for row in rows_of(settings)]
    assert len(rows) == ROWS
    text = read_text(text_file, settings.context)
    for name, row in rows.items():
        model = headprune.load(out / "models" / name)
        dense = rows[f"{row['model']}-dense"]
        assert outside_embeddings(model) == row["parameters"]
        assert row["all_parameters"] - row["parameters"] == VOCABULARY * settings.hidden
        assert sum(len(site.kept) for site in headprune.resolve(model)) == row["heads"]
        losses = window_losses(model, text, settings)
        assert float(losses.mean()) == pytest.approx(row["loss"], rel=1e-5)
        if (keep := (row["gates"] or {}).get("keep")) is not None:
            assert row["heads"] == round(keep * settings.layers * settings.heads)
            share_left = row["parameters"] / dense["parameters"]
            if row["model"] == "all-attention":
                assert share_left == pytest.approx(keep, abs=0.02)
            else:  # feed-forward layers stay
                assert share_left > keep + 0.02
        if row["kind"] != "dense":
            assert row["steps"] == settings.dense_steps + settings.gate_steps + settings.tuning_steps
        if row["gates"] is not None:
            later = rows[f"{row['model']}-dense-trained-on"]
            assert row["behind_trained_on"] == pytest.approx(row["loss"] - later["loss"], abs=1e-9)


def test_tables_hold_the_rows(whole: tuple[Path, Any]) -> None:
    out, _ = whole
    rows = by_name(out)
    one, two = (list(csv.reader(io.StringIO((out / f"table{n}.csv").read_text()))) for n in (1, 2))
    assert len(one) - 1 == ROWS - len(TECHNIQUES)
    assert [line[0] for line in two[1:]] == [
        *("All-attention: dense", "All-attention: dense trained on", "All-attention: keep=0.6"),
        *(f"All-attention: without {name}" for name in TECHNIQUES),
    ]
    line = next(line for line in one if line[0] == "All-attention: keep=0.6")
    row, dense = rows["all-attention-keep-0.6"], rows["all-attention-dense"]
    assert [int(line[1]), int(line[2])] == [row["heads"], row["parameters"]]
    assert float(line[5]) == pytest.approx(row["loss"], abs=1e-4)
    assert float(line[7]) == pytest.approx(100 * (row["loss"] / dense["loss"] - 1), abs=0.01)
    assert "small.txt" in (out / "table1.md").read_text()


def test_an_ablation_differs_in_one_setting(whole: tuple[Path, Any]) -> None:
    """In the plan, in the file, and in what comes out: a setting that changed nothing would leave the same model."""
    rows = by_name(whole[0])
    base = rows["all-attention-keep-0.6"]
    for name, (key, value) in TECHNIQUES.items():
        row = rows[f"all-attention-without-{name.replace(' ', '-')}"]
        assert row["gates"] == {**base["gates"], key: value}
        assert base["gates"][key] != value
        assert row["heads"] == base["heads"]
        assert row["loss_before_tuning"] != base["loss_before_tuning"]


def test_going_on_after_an_interruption_gives_the_same(
    whole: tuple[Path, Any], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the middle of a row; rows that were finished are not made again."""
    first, _ = whole
    expected = (first / "results.json").read_bytes()
    out, call = tmp_path / "out", [*CALL, "--data", str(text_file), "--out", str(tmp_path / "out")]
    made: list[str] = []
    make = study.Study._make

    def stopping(self: study.Study, row: Any, watch: Any) -> dict[str, Any]:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(row.name)
        return make(self, row, watch)

    monkeypatch.setattr(study, "rows_of", lambda settings: rows_of(settings)[:6])
    monkeypatch.setattr(study.Study, "_make", stopping)
    stopped = CliRunner().invoke(app, call)
    assert stopped.exit_code == 130
    assert "The same command resumes" in stopped.stderr
    assert len(results(out)["rows"]) == 3
    monkeypatch.setattr(study.Study, "_make", make)
    assert CliRunner().invoke(app, call).exit_code == 0
    again = json.loads(expected)
    again["rows"] = again["rows"][:6]
    assert results(out) == again
    # Nothing is left to do: the files are written again, the same.
    monkeypatch.setattr(study.Study, "_make", stopping)
    assert CliRunner().invoke(app, call).exit_code == 0
    assert results(out) == again


def test_other_settings_are_refused_in_the_same_directory(whole: tuple[Path, Any], text_file: Path) -> None:
    out, _ = whole
    refused = (
        r"belongs to a reproduction with other settings: seed was 3 and is now 4; use the same settings, or another"
    )
    with pytest.raises(ReproductionError, match=refused):
        reproduce_all_attention(out, data=text_file, scale=0.01, seed=4)
    with pytest.raises(ReproductionError, match=r"with other settings: text_name was .* \(and text_sha256,"):
        reproduce_all_attention(out, scale=0.01, seed=3)


def test_a_damaged_file_of_results(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"rows": [')
    with pytest.raises(ReproductionError, match=r"results\.json is damaged; delete it, or choose another directory\.$"):
        reproduce_all_attention(tmp_path, scale=0.01)


BAD = {
    "no file": (["--data", "{root}/none.txt"], "There is no file"),
    "a folder": (["--data", "{root}"], "cannot be read"),
    "too short": (
        ["--data", "{root}/short.txt"],
        "has 5 bytes, but training and validation need 2,560;",
    ),
    "no text": (["--data", "{root}/binary.txt"], "is not a text in UTF-8; give a text file."),
    "no scale": (["--scale", "0"], "--scale multiplies the steps and must be above 0"),
    "no number": (["--scale", "nan"], "--scale multiplies the steps and must be above 0"),
    "no end": (["--scale", "inf"], "--scale multiplies the steps and must be above 0"),
    "no seed": (["--seed", "-1"], "--seed must be 0 or more"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str, tmp_path: Path) -> None:
    options, sentence = BAD[case]
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe" * 5000)
    call = ["reproduce", "all-attention", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*call, *(option.format(root=tmp_path) for option in options)])
    assert isinstance(result.exception, HeadpruneError)  # which `main` prints, with exit code 2
    assert sentence in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["greedy-gnorm", "--scale", "1"], "No such option: --scale"),
        (["all-attention", "--runs", "runs"], "No such option: --runs"),
        (["another"], "No such command 'another'"),
    ],
)
def test_a_paper_has_its_own_options(words: list[str], sentence: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["reproduce", *words, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert sentence in result.output
    assert not (tmp_path / "out").exists()


# --- its parts ---


def test_the_two_models_are_of_the_same_size() -> None:
    sizes = [outside_embeddings(build(model, Settings())) for model in ("all-attention", "transformer")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.001)


def test_text_is_split_once_and_drawn_by_seed(text_file: Path) -> None:
    text = read_text(text_file, 16)
    both = torch.cat([text.training, text.validation])
    assert bytes(both.tolist()) == text_file.read_bytes()
    assert len(text.validation) == int(0.1 * len(both))
    one, same, other = (torch.stack(list(text.batches(3, 4, 16, seed))) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert one.shape == (3, 4, 16)
    windows = text.windows(10**6, 16)
    assert bytes(windows.flatten().tolist()) == bytes(text.validation.tolist())[: windows.numel()]
    few = text.windows(3, 16)
    assert torch.equal(few, windows[[0, round((len(windows) - 1) / 2), len(windows) - 1]])


def test_without_a_file_the_text_comes_with_python(monkeypatch: pytest.MonkeyPatch) -> None:
    text = read_text(None, 64)
    assert len(text.training) > 200_000
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ReproductionError, match="give a text file with --data"):
        read_text(None, 64)


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [share(step, 100, 0.1) for step in range(100)]
    top = rates.index(max(rates))
    assert top == 10
    assert max(rates) == pytest.approx(1.0)
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.05 <= rates[-1] < 0.06


def test_training_learns_and_is_the_same_twice(text_file: Path) -> None:
    """Numbers that follow each other can be learnt; a loop that steps the wrong way would not."""
    text = read_text(text_file, 16)
    actual = []
    for _ in range(2):
        torch.manual_seed(0)
        model: Any = build("all-attention", SMALL)
        before = window_losses(model, text, SMALL).mean()
        losses: list[float] = []
        train(model, text, SMALL, steps=40, rate=0.01, seed=0, on_loss=losses.append)
        assert len(losses) == 40
        actual.append(window_losses(model, text, SMALL).mean())
        assert actual[-1] < before - 1
    assert actual[0] == actual[1]
