"""Compensation in runs of the command line: settings, journal, saved model, report, resuming, refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import headprune
from helpers import identical, outputs
from run_helpers import headprune as program
from run_helpers import interrupt, material, prune_command, same_but_timing, steps_of
from score_helpers import labelled
from zoo import ZOO


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run by the defaults: residual-gradient, least squares."""
    out = tmp_path_factory.mktemp("compensated") / "run"
    done = program(*prune_command(material().bert, material().data_tsv, out, "--keep", "0.5"))
    assert done.code == 0, done.err
    assert "Criterion residual-gradient, repair lstsq." in done.out
    return out


def test_the_journal_and_the_settings_say_what_was_done(run: Path) -> None:
    settings = json.loads((run / "run.json").read_text())["settings"]
    assert (settings["criterion"], settings["repair"]) == ("residual-gradient", "lstsq")
    dense, *steps = steps_of(run)
    assert dense["compensation"] == []
    for step in steps:
        assert [entry["site"] for entry in step["compensation"]] == sorted({site for site, _ in step["removed"]})
        for entry in step["compensation"]:
            assert entry["kind"] in ("lstsq", "mean")
            assert 0 <= entry["error"] <= entry["error_without"]


def test_the_saved_model_has_the_repaired_weights(run: Path) -> None:
    """It has the shapes of the dense model with heads cut out, and other weights."""
    saved = headprune.load(run / "model")
    gone = [tuple(head) for step in steps_of(run) for head in step["removed"]]
    cut = headprune.remove(headprune.load(material().bert), gone)
    batch = {k: v for k, v in labelled(ZOO["bert"], 0).items() if k != "labels"}
    batch["input_ids"] = batch["input_ids"] % saved.config.vocab_size
    assert not identical(outputs(saved, batch), outputs(cut, batch))
    kept = {name: value.shape for name, value in saved.state_dict().items()}
    assert kept == {name: value.shape for name, value in cut.state_dict().items()}


@pytest.mark.parametrize("lines", [1, 2, 4])
def test_an_interrupted_run_goes_on_to_the_same_bytes(run: Path, tmp_path: Path, lines: int) -> None:
    again = Path(shutil.copytree(run, tmp_path / "run"))
    interrupt(again, lines)
    done = program(*prune_command(material().bert, material().data_tsv, again, "--keep", "0.5"))
    assert done.code == 0, done.err
    same_but_timing(run, again)


def test_the_report_and_the_card_name_the_compensation(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert "by residual-gradient with least-squares repair" in " ".join(page.split())
    assert "Repair undid" in page
    assert "repair `lstsq`" in (run / "model" / "README.md").read_text()


def test_another_compensation_is_another_run(run: Path) -> None:
    command = prune_command(material().bert, material().data_tsv, run, "--keep", "0.5")
    done = program(*command, "--repair", "none")
    assert done.code == 2
    assert "repair was 'lstsq' and is now 'none'" in done.err


@pytest.mark.parametrize("verb", ["prune", "compare"])
@pytest.mark.parametrize(
    ("model", "word", "sentence"),
    [
        ("bert", "least", "There is no repair 'least'; choose one of lstsq, mean, none, dense, scale."),
        ("llama", "mean", "this model has none; use 'lstsq' or 'none'."),
    ],
)
def test_a_wrong_word_writes_nothing(verb: str, model: str, word: str, sentence: str, tmp_path: Path) -> None:
    data = material().data_tsv if model == "bert" else str(material().root / "words.txt")
    out = tmp_path / "out"
    more = ["--criteria", "gnorm"] if verb == "compare" else []
    done = program(
        verb,
        getattr(material(), model),
        "--data",
        data,
        "--out",
        str(out),
        "--repair",
        word,
        "--max-length",
        "8",
        *more,
    )
    assert done.code == 2
    assert done.err.strip().endswith(sentence)
    assert len(done.err.strip().splitlines()) == 1
    assert not out.exists()


def test_a_criterion_with_a_plus_sign_is_for_compare_alone(tmp_path: Path) -> None:
    command = prune_command(material().bert, material().data_tsv, tmp_path / "out")
    done = program(*command, "--criterion", "gnorm+lstsq")
    assert done.code == 2
    assert "its repair with --repair" in done.err


def test_compare_runs_each_name_with_its_own_compensation(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = program(
        *("compare", material().bert, "--data", material().data_tsv, "--out", str(out)),
        *("--criteria", "his,his+lstsq,his+mean", "--calibration-samples", "8", "--batch-size", "6", "--json"),
    )
    assert done.code == 0, done.err
    assert {row["name"] for row in done.json["criteria"]} == {"his", "his+lstsq", "his+mean"}
    for folder, word in (("his", "none"), ("his+lstsq", "lstsq"), ("his+mean", "mean")):
        settings = json.loads((out / folder / "run.json").read_text())["settings"]
        assert (settings["criterion"], settings["repair"]) == ("his", word)
        kinds = {entry["kind"] for step in steps_of(out / folder) for entry in step["compensation"]}
        assert kinds == {"none": set(), "lstsq": {"lstsq", "mean"}, "mean": {"mean"}}[word]
    first = [steps_of(out / folder)[1] for folder in ("his", "his+lstsq")]
    assert first[0]["removed"] == first[1]["removed"]  # the same dense model
    assert first[0]["loss"] != first[1]["loss"]


def test_half_precision_weights_stay_finite_and_are_checked_as_rounded(tmp_path: Path) -> None:
    model = ZOO["bert"].build().to(torch.bfloat16)
    batches = [labelled(ZOO["bert"], seed) for seed in range(2)]
    result = headprune.prune(model, batches, criterion="magnitude", keep=4)
    entries = [entry for step in result.trajectory for entry in step.repairs]
    assert len(entries) == 8
    assert all(entry["error"] <= entry["error_without"] for entry in entries)
    assert all(torch.isfinite(p).all() and p.dtype == torch.bfloat16 for p in result.model.parameters())
