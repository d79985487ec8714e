"""`headprune reproduce all-attention`, with models of a few thousand parameters."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from typer.testing import CliRunner

import headprune
from headprune.cli.main import app
from headprune.errors import HeadpruneError
from headprune.papers import ReproductionError, all_attention
from headprune.papers.all_attention import reproduce_all_attention, study
from headprune.papers.all_attention.outcome import KINDS
from headprune.papers.all_attention.plan import CRITERIA, TECHNIQUES, TITLES, VARIANTS, Settings, build, rows_of
from headprune.papers.all_attention.sizes import LISTED, adaptive_tables, count_outside_embeddings, paper_sizes
from headprune.papers.all_attention.speed import measure_speeds, median_interval
from headprune.papers.all_attention.study import outside_embeddings
from headprune.papers.all_attention.text import VOCABULARY, read_text
from headprune.papers.all_attention.training import share, train, window_losses
from pictures import drawing

SMALL = Settings(layers=2, heads=5, hidden=20, persistent=12, context=16, batch=4, windows=20)
SEEDS = (3, 4)
CALL = ["reproduce", "all-attention", "--scale", "0.01", "--seeds", "3,4", "--json"]
ROWS = 2 * (2 + 3) + 1 + 3 + 1 + 3 * 3


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


def of_seed(out: Path, seed: int = SEEDS[0]) -> dict[str, Any]:
    return json.loads((out / f"seed-{seed}" / "rows.json").read_text())


def by_name(out: Path, seed: int = SEEDS[0]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in of_seed(out, seed)["rows"]}


def test_the_files_of_a_reproduction(whole: tuple[Path, Any], text_file: Path) -> None:
    out, result = whole
    said = json.loads(result.stdout)
    names = {"results.json", *(f"table{number}.{form}" for number in range(1, 6) for form in ("md", "csv"))}
    names |= {f"figures/figure1.{form}" for form in ("png", "svg", "pdf")}
    assert {str(Path(file).relative_to(out)) for file in said["files"]} == names
    actual = results(out)
    assert said["rows"] == actual["rows"]
    assert (actual["seeds"], actual["sizes"]) == (list(SEEDS), paper_sizes())
    assert actual["command"].endswith("--data small.txt --seeds 3,4 --scale 0.01 --out DIR")
    settings = json.loads(json.dumps(SMALL.to_json())) | {
        "scale": 0.01,
        "dense_steps": max(2, round(0.01 * SMALL.dense_steps)),
        "gate_steps": max(2, round(0.01 * SMALL.gate_steps)),
        "tuning_steps": max(2, round(0.01 * SMALL.tuning_steps)),
        "windows": 2,
    }
    for seed in SEEDS:
        assert of_seed(out, seed)["settings"] == {**settings, "seed": seed}
    settings.pop("seed")
    assert actual["settings"] == settings
    assert actual["text"]["name"] == "small.txt"
    assert actual["text"]["training_bytes"] + actual["text"]["validation_bytes"] == text_file.stat().st_size
    for part in (f"{ROWS} of {ROWS}", "Transformer, heads only", "40.0 % fewer heads"):
        assert part in result.stderr
    shown = drawing(out / "figures", "figure1")
    assert {*TITLES.values(), "Lines join models that have had the same steps. Text: small.txt."} <= set(shown.texts)
    pattern = r"Parameters outside embeddings: ([\d.]+)k; .*: ([\d.]+); model: (.+); kind: .+"
    points = [match.groups() for label in shown.labels if (match := re.fullmatch(pattern, label))]
    assert sorted((round(1000 * float(size)), round(float(loss), 5), title) for size, loss, title in points) == sorted(
        (row["parameters"], row["loss"]["mean"], TITLES[row["model"]]) for row in actual["rows"] if row["kind"] in KINDS
    )


def test_seeds_are_summarised(whole: tuple[Path, Any]) -> None:
    """Means, standard deviations and differences by numpy, from the rows of each seed."""
    out, _ = whole
    seeds = [by_name(out, seed) for seed in SEEDS]
    assert seeds[0]["all-attention-dense"]["loss"] != seeds[1]["all-attention-dense"]["loss"]
    for row in results(out)["rows"]:
        losses = np.array([rows[row["name"]]["loss"] for rows in seeds])
        assert row["loss"]["mean"] == pytest.approx(losses.mean(), abs=1e-5)
        assert row["loss"]["deviation"] == pytest.approx(losses.std(ddof=1), abs=1e-5)
        assert row["bits_per_byte"]["values"] == pytest.approx(list(np.log2(np.exp(losses))), abs=1e-5)
        for kind, key in (("dense", "percent_to_dense"), ("dense-trained-on", "percent_to_trained_on")):
            if key in row:
                reference = np.array([rows[f"{row['model']}-{kind}"]["loss"] for rows in seeds])
                assert row[key]["values"] == pytest.approx(list(100 * (losses / reference - 1)), abs=1e-4)
        assert ("speed" in row) == (row["kind"] in ("dense", "target"))


def test_every_row_is_what_its_model_is(whole: tuple[Path, Any], text_file: Path) -> None:
    """Parameters, heads and losses are those of the checkpoints; shares are what was asked for."""
    out, _ = whole
    rows = by_name(out)
    settings = Settings(**{k: tuple(v) if isinstance(v, list) else v for k, v in of_seed(out)["settings"].items()})
    assert list(rows) == [row.name for row in rows_of(settings)]
    assert len(rows) == ROWS
    text = read_text(text_file, settings.context)
    for name, row in rows.items():
        model = headprune.load(out / f"seed-{SEEDS[0]}" / "models" / name)
        dense = rows[f"{row['model']}-dense"]
        assert outside_embeddings(model) == row["parameters"]
        assert row["all_parameters"] - row["parameters"] == VOCABULARY * settings.hidden
        assert sum(len(site.kept) for site in headprune.resolve(model)) == row["heads"]
        losses = window_losses(model, text, settings)
        assert float(losses.mean()) == pytest.approx(row["loss"], rel=1e-5)
        if (keep := (row["gates"] or row["removal"] or {}).get("keep")) is not None:
            assert row["heads"] == round(keep * settings.layers * settings.heads)
            share_left = row["parameters"] / dense["parameters"]
            if row["model"] == "all-attention":
                assert share_left == pytest.approx(keep, abs=0.02)
            else:  # feed-forward layers stay
                assert share_left > keep + 0.02
        if row["kind"] != "dense":
            assert row["steps"] == settings.dense_steps + settings.gate_steps + settings.tuning_steps
        if row["gates"] is not None or row["removal"] is not None:
            later = rows[f"{row['model']}-dense-trained-on"]
            assert row["behind_trained_on"] == pytest.approx(row["loss"] - later["loss"], abs=1e-9)


def test_criteria_remove_as_many_heads_as_gates(whole: tuple[Path, Any], text_file: Path) -> None:
    """After as many steps, which are those of the dense model trained on, and with the same fine-tuning after them."""
    out, _ = whole
    rows, folder = by_name(out), out / f"seed-{SEEDS[0]}" / "models"
    settings = Settings(**{k: tuple(v) if isinstance(v, list) else v for k, v in of_seed(out)["settings"].items()})
    text = read_text(text_file, settings.context)
    for keep in settings.compared:
        gates = rows[f"all-attention-keep-{keep}"]
        for name, options in CRITERIA.items():
            row = rows[f"all-attention-{name}-keep-{keep}"]
            assert (row["heads"], row["parameters"], row["steps"]) == (
                gates["heads"],
                gates["parameters"],
                gates["steps"],
            )
            assert row["removal"] == {**options, "keep": keep}
            assert row["behind_gates"] == pytest.approx(row["loss"] - gates["loss"], abs=1e-9)
    # Again by hand, from the checkpoint before the removal.
    model = headprune.load(folder / "all-attention-dense-trained-on-before-removal")
    model.set_attn_implementation("eager")
    windows = list(text.batches(8, settings.batch, settings.context, settings.seed + 3))
    assert sum(map(len, windows)) == settings.calibration
    scores = headprune.score(model, [{"input_ids": ids, "labels": ids} for ids in windows], criterion="his").scores
    row = rows["all-attention-his-keep-0.4"]
    best = scores.flatten().argsort(descending=True)[: row["heads"]]
    kept = [
        sorted(int(index) % settings.heads for index in best if int(index) // settings.heads == site) for site in (0, 1)
    ]
    assert list(row["kept"].values()) == kept


def test_tables_hold_the_rows(whole: tuple[Path, Any]) -> None:
    out, _ = whole
    rows = {row["name"]: row for row in results(out)["rows"]}
    one, two, three, four, five = (
        list(csv.reader(io.StringIO((out / f"table{n}.csv").read_text()))) for n in range(1, 6)
    )
    assert len(one) - 1 == sum(row["kind"] in KINDS for row in rows.values())
    assert [line[0] for line in two[1:]] == [
        "keep=0.6",
        *(f"without {name}" for name in TECHNIQUES),
        *(f"with {name}" for name in VARIANTS),
    ]
    line = next(line for line in one if line[0] == "All-attention: keep=0.6")
    row = rows["all-attention-keep-0.6"]
    assert [int(line[1]), int(line[2])] == [row["heads"], row["parameters"]]
    assert line[4] == f"{row['loss']['mean']:.4f} ± {row['loss']['deviation']:.4f}"
    assert line[5] == f"{row['percent_to_dense']['mean']:+.2f} ± {row['percent_to_dense']['deviation']:.2f}"
    assert "small.txt" in (out / "table1.md").read_text()
    assert len(three) - 1 == 2 + 3 * 3
    assert len(four) - 1 == 2 * 4
    assert [line[0] for line in five[1:]] == ["128", "73"]


def test_an_ablation_differs_in_one_setting(whole: tuple[Path, Any]) -> None:
    """In the plan, in the file, and in what comes out: a setting that changed nothing would leave the same model."""
    rows = by_name(whole[0])
    base = rows["all-attention-keep-0.6"]
    changes = {f"without {name}": change for name, change in TECHNIQUES.items()}
    changes |= {f"with {name}": change for name, change in VARIANTS.items()}
    for what, (key, value) in changes.items():
        row = rows[f"all-attention-{what.replace(' ', '-')}"]
        assert row["gates"] == {**base["gates"], key: value}
        assert base["gates"][key] != value
        assert row["heads"] == base["heads"]
        assert row["loss_before_tuning"] != base["loss_before_tuning"]


def test_going_on_after_an_interruption_gives_the_same(
    whole: tuple[Path, Any], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in the middle of a row; rows that were finished are not made again."""
    expected = of_seed(whole[0])
    out = tmp_path / "out"
    call = [
        "reproduce",
        "all-attention",
        "--scale",
        "0.01",
        "--seeds",
        "3",
        "--data",
        str(text_file),
        "--out",
        str(out),
    ]
    made: list[str] = []
    make = study.Study._make

    def stopping(self: study.Study, row: Any, watch: Any) -> dict[str, Any]:
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(row.name)
        return make(self, row, watch)

    monkeypatch.setattr(study.Study, "_make", stopping)
    stopped = CliRunner().invoke(app, call)
    assert stopped.exit_code == 130
    assert "The same command resumes" in stopped.stderr
    assert len(of_seed(out)["rows"]) == 3
    monkeypatch.setattr(study.Study, "_make", make)
    assert CliRunner().invoke(app, call).exit_code == 0
    assert of_seed(out) == expected
    first = (out / "results.json").read_bytes()
    # Nothing is left to do: the files are written again, the same, times of the first run included.
    monkeypatch.setattr(study.Study, "_make", stopping)
    assert CliRunner().invoke(app, call).exit_code == 0
    assert (out / "results.json").read_bytes() == first


def test_other_settings_are_refused_in_the_same_directory(whole: tuple[Path, Any], text_file: Path) -> None:
    out, _ = whole
    refused = (
        r"belongs to a reproduction with other settings: scale was 0.01 and is now 0.02.*; use the same settings, or"
    )
    with pytest.raises(ReproductionError, match=refused):
        reproduce_all_attention(out, data=text_file, scale=0.02, seeds=SEEDS)
    with pytest.raises(ReproductionError, match=r"with other settings: text_name was .* \(and text_sha256,"):
        reproduce_all_attention(out, scale=0.01, seeds=SEEDS)


def test_a_damaged_file_of_results(tmp_path: Path) -> None:
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "rows.json").write_text('{"rows": [')
    with pytest.raises(ReproductionError, match=r"rows\.json is damaged; delete it, or choose another directory\.$"):
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
    "no seed": (["--seeds", "-1"], "A seed must be 0 or more, but --seeds has -1."),
    "no numbers": (["--seeds", "0;1"], "--seeds takes whole numbers with commas, such as 0,1,2, not '0;1'."),
    "a seed twice": (["--seeds", "1,1"], "--seeds needs one or more different numbers, such as 0,1,2, not [1, 1]."),
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


def test_speeds_are_ratios_of_turns() -> None:
    """A model that does everything twice takes longer; the model itself is exactly as fast as itself."""
    torch.manual_seed(0)
    model: Any = build("all-attention", SMALL)
    model.set_attn_implementation("eager")

    class Twice(torch.nn.Module):
        def forward(self, **inputs: Any) -> Any:
            model(**inputs)
            return model(**inputs)

    speeds = measure_speeds(
        {"once": model, "twice": Twice()}, {"once": "once", "twice": "once"}, torch.zeros(4, 16).long(), turns=9
    )
    assert (speeds["once"]["speedup"], speeds["once"]["interval"]) == (1.0, [1.0, 1.0])
    low, high = speeds["twice"]["interval"]
    assert low <= speeds["twice"]["speedup"] <= high
    assert speeds["twice"]["milliseconds"] > speeds["once"]["milliseconds"]


@pytest.mark.parametrize("count", [1, 5, 6, 40, 101])
def test_the_interval_of_a_median_is_that_of_ranks(count: int) -> None:
    """The widest ranks that leave 2.5 % outside at each end, by scipy; of few values it is all of them."""
    values = [float(value) for value in range(count)]
    outside = int(scipy.stats.binom.ppf(0.025, count, 0.5))  # the first rank with more than 2.5 % at or below it
    assert median_interval(values[::-1]) == (values[max(outside - 1, 0)], values[min(count - outside, count - 1)])


# --- the sizes of the paper ---


def test_the_sizes_of_the_paper() -> None:
    """Dense and with 43 % of the heads removed, part by part: both are 1.4 % above what is published, and their
    quotient is the published one."""
    layer = 4 * 512 * 512 + 2 * 8 * 2048 * 64  # maps, and persistent keys and values
    dense, pruned = paper_sizes()
    assert dense["counted"] == 16 * (layer + 2 * 512)
    assert pruned["counted"] == 73 * layer // 8 + 16 * 2 * 512
    for row, heads in ((dense, 128), (pruned, 73)):
        assert row["relative_positions"] == heads * (64 * 512 + 2 * 64) + 16 * 512
        assert row["total"] == row["counted"] + row["relative_positions"]
        assert row["total"] / 1e6 == pytest.approx(1.014 * row["published_millions"], rel=1e-3)
    assert pruned["total"] / dense["total"] == pytest.approx(30.7 / 53.8, abs=1e-3)
    # The published numbers are of layers: tables of tokens alone are a third of 53.8 M.
    assert adaptive_tables() == 18_810_040


@pytest.mark.parametrize("weight", LISTED)
def test_the_listed_heads_have_no_other_size_than_their_number(weight: float) -> None:
    heads = LISTED[weight]
    assert len(heads) == 16
    assert max(heads) <= 8
    per_head = (4 * 512 * 512 + 2 * 8 * 2048 * 64) // 8
    assert count_outside_embeddings(sum(heads)) == per_head * sum(heads) + 16 * 2 * 512
