"""The program: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from typer.main import get_command
from typer.testing import CliRunner

import forked_python
import headprune
from headprune.cli import main as cli
from headprune.cli.option_tables import commands_of
from headprune.criteria import REGISTRY
from helpers import contents
from run_helpers import COLOURS, Done, environment, material, prune_command, steps_of, write_rows
from run_helpers import headprune as program

PLUGIN = """
import torch
import headprune

@headprune.criterion("first-heads", use="a test")
class FirstHeads(headprune.Criterion):
    def from_weights(self, model, sites):
        scores = torch.full((len(sites), max(site.original_heads for site in sites)), torch.nan, dtype=torch.float64)
        for site in sites:
            for head in site.kept:
                scores[site.index, head] = 100.0 * site.index + head
        return scores
"""


@pytest.fixture
def registry() -> Iterator[None]:
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def refused(done: Done, *parts: str) -> None:
    """Exit code 2, nothing on stdout, and one sentence on stderr that holds these parts."""
    said = " ".join(done.err.split())
    assert done.code == 2, done.err
    assert done.out == ""
    assert "Traceback" not in done.err
    assert said.startswith("Error: ")
    assert said.endswith((".", "?"))
    assert len([line for line in done.err.splitlines() if line.strip()]) == 1, "one line, as one sentence is"
    for part in parts:
        assert part in said, said


# --- what it prints ---


def test_inspect() -> None:
    actual = program("inspect", material().bert, "--json").json
    assert actual["model_type"] == "bert"
    site = {
        "kind": "heads",
        "place": "encoder self",
        "heads": 4,
        "original_heads": 4,
        "kv_heads": 4,
        "head_dim": 6,
        "applications": 1,
    }
    assert len(actual["sites"]) == 3
    for number, one in enumerate(actual["sites"]):
        assert one.items() >= {**site, "path": f"bert.encoder.layer.{number}.attention.self"}.items()
    model = headprune.load(material().bert)
    assert actual["parameters"]["total"] == sum(parameter.numel() for parameter in model.parameters())
    assert sum(actual["parameters"]["modules"].values()) == actual["parameters"]["total"]


def test_inspect_needs_the_config_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((Path(material().llama) / "config.json").read_bytes())
    assert program("inspect", tmp_path, "--json").json == program("inspect", material().llama, "--json").json


def test_score() -> None:
    m = material()
    done = program("score", m.bert, "--data", m.data_csv, "--criterion", "hies(alpha=0.7)", "--json")
    assert done.json.keys() >= {"criterion", "samples", "scores"}
    assert (done.json["criterion"], done.json["samples"]) == ("hies(alpha=0.7)", 36)
    assert [len(row) for row in done.json["scores"]] == [4, 4, 4]
    assert all(0 <= value <= 1 for row in done.json["scores"] for value in row)


def test_prune_then_everything_on_the_pruned_model(tmp_path: Path) -> None:
    m, out = material(), tmp_path / "run"
    done = program(*prune_command(m.bert, m.data_csv, out, "--keep", "0.5", "--rescore", "every", "--json"))
    assert done.code == 0, done.err
    lines = steps_of(out)
    expected = {
        "run": str(out),
        "heads_before": 12,
        "heads_after": 6,
        "metric": "accuracy",
        "dense": lines[0]["metric"],
        "pruned": lines[6]["metric"],
    }
    assert done.json.items() >= expected.items()
    record = json.loads((out / "run.json").read_text())
    assert record["samples"] == {"calibration": 8, "evaluation": 28}
    assert record["savings"]["pruned"]["heads"] == 6
    assert (out / "curve.csv").read_text().startswith("Pruned_Heads,Accuracy,")
    assert len((out / "curve.csv").read_text().splitlines()) == 8

    gone = {tuple(head) for line in lines for head in line["removed"]}
    inspected = program("inspect", out / "model", "--json").json
    assert [site["heads"] for site in inspected["sites"]] == [
        4 - sum(site == number for site, _ in gone) for number in range(3)
    ]
    assert {site["original_heads"] for site in inspected["sites"]} == {4}
    assert inspected["parameters"]["total"] == lines[6]["parameters"]

    scored = program("score", out / "model", "--data", m.data_csv, "--json").json["scores"]
    assert {(s, h) for s, row in enumerate(scored) for h, value in enumerate(row) if value is None} == gone

    again = program(*prune_command(str(out / "model"), m.data_csv, tmp_path / "second", "--keep", "4", "--json")).json
    assert (again["heads_before"], again["heads_after"]) == (6, 4)
    assert gone.isdisjoint({tuple(head) for line in steps_of(tmp_path / "second") for head in line["removed"]})


def test_the_saved_model_is_the_one_at_the_stop_when_the_run_explores(tmp_path: Path) -> None:
    m, out = material(), tmp_path / "run"
    done = program(*prune_command(m.bert, m.data_csv, out, "--keep", "9", "--explore", "--rescore", "every", "--json"))
    assert done.json["heads_after"] == 9
    assert len(steps_of(out)) == 13
    kept = sum(site.heads for site in headprune.resolve(headprune.load(out / "model")))
    assert kept == 9


def test_compare(tmp_path: Path) -> None:
    m, out = material(), tmp_path / "runs"
    done = program(
        *("compare", m.bert, "--data", m.data_csv, "--criteria", "magnitude,random", "--out", out, "--json"),
        *("--calibration-samples", "8", "--every", "3"),
    )
    assert done.code == 0, done.err
    assert {row["name"] for row in done.json["criteria"]} == {"magnitude", "random"}
    assert done.json["criteria"] == json.loads((out / "comparison.json").read_text())["criteria"]


def test_criteria_lists_all() -> None:
    rows = program("criteria", "--json").json["criteria"]
    assert [row["name"] for row in rows] == list(REGISTRY)
    assert {"gnorm", "his", "tis", "attribution", "entropy", "deficit", "hies", "magnitude", "taylor", "random"} <= {
        row["name"] for row in rows
    }
    needs = {row["name"]: row["needs"] for row in rows}
    assert needs["random"] == []
    assert needs["his"] == ["labels", "gradients"]
    shown = program("criteria")
    assert shown.code == 0
    assert all(name in shown.out for name in REGISTRY)


RUNNER = CliRunner()


def test_every_option_of_every_verb_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for verb, command in commands_of(get_command(cli.app)).items():
        shown = RUNNER.invoke(cli.app, [*verb.split(), "--help"]).stdout
        options = [option for option in command.params if option.opts[0].startswith("-") and not option.hidden]
        assert [option.opts[0] for option in options if option.opts[0] not in shown or not option.help] == [], verb


def test_what_people_read(tmp_path: Path) -> None:
    """Without --json: tables and a heat map on stdout, progress on stderr."""
    m = material()
    inspected = RUNNER.invoke(cli.app, ["inspect", m.bert])
    assert "12 heads hold" in " ".join(inspected.stdout.split())
    scored = RUNNER.invoke(cli.app, ["score", m.bert, "--data", m.data_csv])
    assert "least important (site, head):" in scored.stdout
    pruned = RUNNER.invoke(cli.app, prune_command(m.bert, m.data_csv, tmp_path / "run", "--keep", "10"))
    assert pruned.exit_code == 0
    assert "Removed 2 of 12 heads: accuracy" in " ".join(pruned.stdout.split())


def test_version() -> None:
    assert program("--version").out == f"headprune {headprune.__version__}\n"


@pytest.mark.slow
def test_stdout_of_the_installed_program_is_json_alone(tmp_path: Path) -> None:
    """Whatever writes to it. Of torchao, which transformers imports where it is there, nobody hears when looking at a
    model."""
    m = material()
    script = Path(sys.executable).with_name("headprune")
    installed = [str(script)] if script.is_file() else [sys.executable, "-m", "headprune"]
    command = [*installed, "inspect", m.bert, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120, check=True)
    assert json.loads(done.stdout)["model_type"] == "bert"
    assert done.stderr == ""
    pruned = prune_command(m.bert, m.data_csv, tmp_path / "run", "--keep", "10", "--json")
    done = forked_python.run("-m", "headprune", *pruned)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["heads_after"] == 10


# --- score: files, samples, plugins ---


def test_scores_go_to_a_csv_file(tmp_path: Path) -> None:
    m = material()
    done = program("score", m.bert, "--data", m.data_csv, "--out", tmp_path / "scores.csv", "--json")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "scores.csv").read_text())))
    assert [(int(row["site"]), int(row["head"])) for row in rows] == [(s, h) for s in range(3) for h in range(4)]
    for row in rows:
        expected = done.json["scores"][int(row["site"])][int(row["head"])]
        assert float(row["score"]) == pytest.approx(expected, rel=1e-8)


def test_samples_are_drawn_by_the_seed() -> None:
    m = material()

    def scores(*options: str) -> Any:
        done = program("score", m.bert, "--data", m.data_csv, "--samples", "6", "--json", *options)
        assert done.json["samples"] == 6
        return done.json["scores"]

    assert scores("--seed", "3") == scores("--seed", "3")
    assert scores("--seed", "3") != scores("--seed", "4")


def test_a_plugin_makes_ones_own_criterion_usable(tmp_path: Path, registry: None) -> None:
    m = material()
    plugin = tmp_path / "mine.py"
    plugin.write_text(PLUGIN)
    done = program("score", m.bert, "--data", m.data_csv, "--criterion", "first-heads", "--plugin", plugin, "--json")
    assert done.json["scores"] == [[0, 1, 2, 3], [100, 101, 102, 103], [200, 201, 202, 203]]
    REGISTRY.pop("first-heads")
    out = tmp_path / "run"
    command = prune_command(m.bert, m.data_csv, out, "--criterion", "inverse:first-heads", "--plugin", str(plugin))
    assert program(*command, "--keep", "10").code == 0
    assert [line["removed"] for line in steps_of(out)] == [[], [[2, 3]], [[2, 2]]]
    REGISTRY.pop("first-heads")
    rows = program("criteria", "--plugin", plugin, "--json").json["criteria"]
    assert rows[-1]["name"] == "first-heads"


# --- other tasks, end to end ---

TASKS = {
    "regression": ("regressor", "numbers_csv", [], "pearson", 12),
    "pairs": ("bert", "pairs_tsv", ["--pair-column", "second"], "accuracy", 12),
    "causal": ("gpt2", "words_txt", ["--max-length", "8"], "perplexity", 12),
    "grouped": ("llama", "words_txt", ["--max-length", "8", "--every", "3"], "perplexity", 18),
    "masked": ("masked", "words_txt", ["--max-length", "20"], "perplexity", 12),
    "tied": ("albert", "pairs_tsv", [], "accuracy", 4),
    "images": ("vit", "pictures_npz", ["--every", "4"], "accuracy", 12),
    "image-folder": ("vit", "pictures_folder", ["--every", "4"], "accuracy", 12),
}


@pytest.mark.parametrize("task", TASKS)
def test_every_task(task: str, tmp_path: Path) -> None:
    model, data, options, metric, heads = TASKS[task]
    m, out = material(), tmp_path / "run"
    options = options if "--every" in options else [*options, "--every", "2"]
    done = program(*prune_command(getattr(m, model), getattr(m, data), out, *options, "--json"))
    assert done.code == 0, done.err
    assert (done.json["metric"], done.json["heads_before"], done.json["heads_after"]) == (metric, heads, 0)
    rows = list(csv.DictReader(io.StringIO((out / "curve.csv").read_text())))
    times = 3 if task == "tied" else 1
    assert [int(row["Pruned_Heads"]) for row in rows] == [times * int(row["Removed_Heads"]) for row in rows]
    assert int(rows[-1]["Pruned_Heads"]) == times * heads
    assert all(numpy.isfinite(float(row["Accuracy"])) for row in rows)
    headprune.load(out / "model")


def test_half_precision(tmp_path: Path) -> None:
    m = material()
    done = program(
        *prune_command(m.bert, m.data_csv, tmp_path / "run", "--keep", "10", "--dtype", "bfloat16", "--json")
    )
    assert (done.code, done.json["heads_after"]) == (0, 10)


# --- how it refuses ---


def bad_files(folder: Path) -> dict[str, str]:
    texts = ["w5 w6 w7", "w8 w9", "w7 w6"]

    def rows(name: str, *labels: Any) -> str:
        return write_rows(folder / name, [{"text": t, "label": n} for t, n in zip(texts, labels, strict=True)])

    (folder / "empty.csv").write_text("")
    (folder / "header.csv").write_text("text,label\n")
    (folder / "ragged.csv").write_text("text,label\nw5,red\nw6,a,b,c,d\n")
    (folder / "binary.csv").write_bytes(bytes(range(256)))
    (folder / "broken.parquet").write_bytes(b"PAR1 this is none")
    (folder / "broken.jsonl").write_text('{"text": "w5", "label"\n')
    (folder / "blank.txt").write_text("  \n")
    (folder / "page.html").write_text("<p>w5</p>")
    numpy.savez(folder / "no_x.npz", pictures=numpy.zeros((2, 16, 16, 3)), y=numpy.zeros(2))
    (folder / "not.npz").write_bytes(b"nothing")
    (folder / "nothing").mkdir()
    return {
        "out-of-range": rows("range.csv", 0, 7, 1),
        "negative": rows("negative.csv", 0, -1, 1),
        "unknown-name": rows("names.csv", "red", "purple", "green"),
        "fraction": rows("fraction.csv", 0.0, 0.5, 1.0),
        "no-label": rows("none.jsonl", 0.5, None, 1.5),
        "words": rows("words.csv", "much", "little", "much"),
    }


REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "wrong-text-column": (
        ["{bert}", "{data_csv}", "--text-column", "txt"],
        ["no text column 'txt'", "'text', 'label'"],
    ),
    "wrong-pair-column": (["{bert}", "{data_csv}", "--pair-column", "b"], ["no pair column 'b'", "'text', 'label'"]),
    "wrong-label-column": (["{bert}", "{data_csv}", "--label-column", "y"], ["no label column 'y'", "'text', 'label'"]),
    "empty-file": (["{bert}", "{bad}/empty.csv"], ["empty.csv cannot be read as csv"]),
    "no-rows": (["{bert}", "{bad}/header.csv"], ["header.csv has no rows"]),
    "unreadable-csv": (["{bert}", "{bad}/ragged.csv"], ["ragged.csv cannot be read as csv", "check the file"]),
    "binary-csv": (["{bert}", "{bad}/binary.csv"], ["binary.csv cannot be read as csv"]),
    "unreadable-parquet": (["{bert}", "{bad}/broken.parquet"], ["broken.parquet cannot be read as parquet"]),
    "unreadable-jsonl": (["{bert}", "{bad}/broken.jsonl"], ["broken.jsonl cannot be read as jsonl"]),
    "unknown-kind-of-file": (["{bert}", "{bad}/page.html"], ["page.html is not a table", ".csv, .tsv"]),
    "labels-out-of-range": (["{bert}", "{out-of-range}"], ["Label 7 in row 1", "3 labels, numbered 0 to 2"]),
    "labels-negative": (["{bert}", "{negative}"], ["Label -1 in row 1", "numbered 0 to 2"]),
    "unknown-label-name": (["{bert}", "{unknown-name}"], ["Label 'purple' in row 1", "none of the model's labels"]),
    "label-is-a-fraction": (["{bert}", "{fraction}"], ["Label 0.5 in row 1"]),
    "words-for-a-regressor": (["{regressor}", "{words}"], ["'label' must hold numbers"]),
    "a-number-is-missing": (["{regressor}", "{no-label}"], ["'label'"]),
    "unknown-criterion": (
        ["{bert}", "{data_csv}", "--criterion", "gnrom"],
        ["no criterion 'gnrom'; did you mean 'gnorm'?"],
    ),
    "unlike-any-criterion": (
        ["{bert}", "{data_csv}", "--criterion", "zzz"],
        ["no criterion 'zzz'; there are: attribution"],
    ),
    "alpha-of-1": (["{bert}", "{data_csv}", "--criterion", "hies(alpha=1)"], ["alpha of hies must be in [0, 1)"]),
    "alpha-below-0": (["{bert}", "{data_csv}", "--criterion", "hies(alpha=-0.1)"], ["must be in [0, 1)", "-0.1"]),
    "alpha-no-number": (["{bert}", "{data_csv}", "--criterion", "hies(alpha=x)"], ["'x' is not a float"]),
    "no-such-option": (["{bert}", "{data_csv}", "--criterion", "his(alpha=1)"], ["'his' has no option 'alpha'"]),
    "needs-labels": (["{bert}", "{unlabelled_csv}", "--criterion", "his"], ["'his' needs labels", "--labels self"]),
    "labels-word": (["{bert}", "{data_csv}", "--criterion", "his", "--labels", "mine"], ['must be "given" or "self"']),
    "missing-data": (["{bert}", "{bad}/nowhere.csv"], ["There is no file", "nowhere.csv"]),
    "missing-text": (["{gpt2}", "{bad}/nowhere.txt"], ["There is no file", "nowhere.txt"]),
    "blank-text": (["{gpt2}", "{bad}/blank.txt"], ["blank.txt is empty"]),
    "missing-model": (["{bad}/nowhere/at/all", "{data_csv}"], ["There is no directory", "check the path"]),
    "not-a-model": (["{bad}", "{data_csv}"], ["has no config.json"]),
    "unknown-dtype": (["{bert}", "{data_csv}", "--dtype", "int8"], ["no precision 'int8'; choose one of float32"]),
    "missing-plugin": (
        ["{bert}", "{data_csv}", "--plugin", "{bad}/mine.py"],
        ["mine.py cannot be imported", "no such file"],
    ),
    "missing-module": (["{bert}", "{data_csv}", "--plugin", "no_such_mod"], ["no_such_mod cannot be imported"]),
    "broken-plugin": (["{bert}", "{data_csv}", "--plugin", "{bad}/broken.py"], ["broken.py cannot be imported"]),
    "npz-without-x": (["{vit}", "{bad}/no_x.npz"], ["has no array x or x_train or x_test", "pictures, y"]),
    "no-archive": (["{vit}", "{bad}/not.npz"], ["is not a numpy archive"]),
    "no-images": (["{vit}", "{bad}/nothing"], ["has no images"]),
    "table-for-images": (["{vit}", "{data_csv}"], ["An image model cannot read", "one sub-folder per label"]),
    "no-tokenizer": (
        ["{bert}", "{data_csv}", "--processor", "{bad}/nothing"],
        ["No tokenizer was found", "--processor"],
    ),
}

REFUSED_RUNS: dict[str, tuple[list[str], list[str]]] = {
    "unknown-metric": (
        ["{bert}", "{data_csv}", "--metric", "acuracy"],
        ["no metric 'acuracy'; did you mean 'accuracy'?"],
    ),
    "metric-of-another-task": (["{regressor}", "{numbers_csv}", "--metric", "accuracy"], ["accuracy"]),
    "unknown-compensation": (
        ["{bert}", "{data_csv}", "--repair", "lsq"],
        ["no repair 'lsq'; choose one of lstsq, mean, none"],
    ),
    "compensation-in-the-name": (["{bert}", "{data_csv}", "--criterion", "gnorm+lstsq"], ["--repair"]),
    "unknown-schedule": (["{bert}", "{data_csv}", "--schedule", "lazy"], ["no schedule 'lazy'; choose one of greedy"]),
    "bad-keep": (["{bert}", "{data_csv}", "--keep", "half"], ["--keep takes a share such as 0.5", "'half'"]),
    "keep-too-large": (["{bert}", "{data_csv}", "--keep", "1.5"], ["between 0 and 1, but it is 1.5"]),
    "keep-too-many": (["{bert}", "{data_csv}", "--keep", "99"], ["has 12 heads, so 99 cannot be kept"]),
    "negative-drop": (["{bert}", "{data_csv}", "--max-drop", "-0.1"], ["max_drop must not be negative"]),
    "no-labels-to-evaluate": (
        ["{bert}", "{unlabelled_csv}", "--metric", "accuracy"],
        ["no labels", "--label-column", "--metric fidelity"],
    ),
    "no-such-device": (
        ["{bert}", "{data_csv}", "--device", "tpu"],
        ["no device 'tpu'; choose cpu, cuda"],
    ),
    "device-not-here": (["{bert}", "{data_csv}", "--device", "cuda:63"], ["has no device 'cuda:63'; choose cpu"]),
    "no-such-task": (["{bert}", "{data_csv}", "--task", "tagging"], ["no task 'tagging'"]),
    "long-path": (["{bert}", "x" * 300 + ".csv"], ["cannot be looked up (File name too long)"]),
    "missing-calibration": (["{bert}", "{data_csv}", "--calibration", "{bad}/no.csv"], ["There is no file"]),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    m = material()
    bad = tmp_path_factory.mktemp("bad")
    names = ("bert", "regressor", "gpt2", "vit", "data_csv", "unlabelled_csv", "numbers_csv", "words_txt")
    (bad / "broken.py").write_text("def broken(:\n")
    return {"bad": str(bad), **bad_files(bad), **{name: getattr(m, name) for name in names}}


def filled(arguments: list[str], places: dict[str, str]) -> list[str]:
    result = []
    for argument in arguments:
        for name, place in places.items():
            argument = argument.replace("{" + name + "}", place)
        result.append(argument)
    model, data, *rest = result
    return [model, "--data", data, *rest]


# The verbs read models and data with the same code, so that a few cases are enough for the other verb.
@pytest.mark.parametrize("case", ["wrong-text-column", "unknown-criterion", "needs-labels", "missing-model"])
def test_score_refuses(case: str, places: dict[str, str], tmp_path: Path, registry: None) -> None:
    arguments, parts = REFUSED[case]
    refused(program("score", *filled(arguments, places), "--out", tmp_path / "scores.csv"), *parts)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("case", REFUSED | REFUSED_RUNS)
def test_prune_refuses(case: str, places: dict[str, str], tmp_path: Path, registry: None) -> None:
    """Nothing is written: neither a directory nor a record that would refuse the command once it is right."""
    arguments, parts = (REFUSED | REFUSED_RUNS)[case]
    refused(program("prune", *filled(arguments, places), "--out", tmp_path / "run"), *parts)
    assert list(tmp_path.iterdir()) == []


COMPARE = {
    "unknown-criterion": (["--criteria", "gnorm,hiss"], ["no criterion 'hiss'; did you mean 'his'?"]),
    "none": (["--criteria", ","], ["Name at least one criterion"]),
    "twice": (["--criteria", "gnorm,his,gnorm"], ["'gnorm' is listed more than once"]),
    "alpha": (["--criteria", "gnorm", "--alpha", "0.5"], ["--alpha takes only auto, not '0.5'"]),
    "metric": (["--criteria", "gnorm", "--metric", "speed"], ["no metric 'speed'"]),
    "schedule": (["--criteria", "gnorm", "--schedule", "lazy"], ["no schedule 'lazy'"]),
    "suffix": (["--criteria", "gnorm+lsq"], ["no repair 'lsq'; choose one of lstsq, mean, none"]),
    "compensation": (["--criteria", "gnorm", "--repair", "lsq"], ["no repair 'lsq'"]),
}


@pytest.mark.parametrize("case", COMPARE)
def test_compare_refuses(case: str, tmp_path: Path) -> None:
    options, parts = COMPARE[case]
    m = material()
    refused(program("compare", m.bert, "--data", m.data_csv, "--out", tmp_path / "runs", *options), *parts)
    assert list(tmp_path.iterdir()) == []


def test_out_is_a_file(tmp_path: Path) -> None:
    m = material()
    (tmp_path / "run").write_text("a file")
    refused(program(*prune_command(m.bert, m.data_csv, tmp_path / "run")), "is a file; choose a directory")
    refused(program(*prune_command(m.bert, m.data_csv, tmp_path / "run" / "deeper")), "Cannot write to")
    assert contents(tmp_path) == {"run": b"a file"}


def test_out_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    m = material()
    assert program(*prune_command(m.bert, m.data_csv, Path("."), "--keep", "11")).code == 0
    assert len(steps_of(tmp_path)) == 2


def test_out_of_score_has_no_directory(tmp_path: Path) -> None:
    m = material()
    refused(
        program("score", m.bert, "--data", m.data_csv, "--out", tmp_path / "no" / "scores.csv"),
        "There is no directory",
        "create it first",
    )


def test_too_few_rows_to_keep_apart(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "one.csv", [{"text": "w5 w6", "label": COLOURS[0]}])
    refused(program(*prune_command(material().bert, data, tmp_path / "run")), "too few rows", "--same-data")
    assert not (tmp_path / "run").exists()
    done = program(*prune_command(material().bert, data, tmp_path / "run", "--same-data", "--keep", "11"))
    assert done.code == 0


def test_inspect_refuses(tmp_path: Path) -> None:
    refused(program("inspect", tmp_path / "no"), "There is no directory", "check the path")
    refused(program("inspect", tmp_path), "has no config.json")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["score"], "Missing argument"),
        (["prune", "x", "--data", "y"], "Missing option '--out'"),
        (["score", "x", "--data", "y", "--samples", "0"], "Invalid value for '--samples'"),
    ],
)
def test_a_command_that_is_not_complete(arguments: list[str], problem: str) -> None:
    done = program(*arguments)
    assert (done.code, done.out) == (2, "")
    assert problem in done.err


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("headprune.measure.inspection.survey", broken)
    with pytest.raises(ZeroDivisionError):
        program("inspect", material().bert)


def test_a_negative_drop_of_an_export_is_refused_before_the_export(tmp_path: Path) -> None:
    done = program("export", material().bert, "--to", "onnx", "--out", tmp_path / "out", "--max-drop", "-1")
    assert (done.code, done.err.strip()) == (2, "Error: --max-drop must be a number at least 0, not -1.0.")
    assert not (tmp_path / "out").exists()
