"""`headprune export`: a run's model on the run's own samples, and what is written down of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import openvino
import pytest
import torch
from transformers import AutoModelForSequenceClassification

import headprune as package
from export_helpers import program
from headprune.reports.exports import exports_of
from headprune.runs.exports import ExportRequest
from headprune.tasks import task_of
from run_helpers import classifier, headprune, material, prune_command, tokenizer

# Compiling takes most of a minute and is tested where programs are.
KEEP = ("--keep", "0.5", "--criterion", "magnitude", "--evaluation-samples", "12")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of one layer, since these tests export it, and what is pruned of it, a dozen times."""
    folder = tmp_path_factory.mktemp("models") / "short"
    classifier(num_hidden_layers=1).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def run(dense: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "run"
    done = headprune(*prune_command(dense, material().data_csv, out, *KEEP))
    assert done.code == 0, done.err
    return out


def copied(run: Path, folder: Path) -> Path:
    shutil.copytree(run, folder / "run")
    return folder / "run"


def test_a_run_is_exported_checked_and_written_down(dense: str, run: Path, tmp_path: Path) -> None:
    own = copied(run, tmp_path)
    before = (own / "model" / "README.md").read_text()
    done = headprune("export", own, "--to", "onnx", "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    actual, result = done.json, json.loads((own / "run.json").read_text())["result"]
    # The samples, the metric and its value are the run's own.
    assert actual["check"]["samples"] == 12
    assert actual["check"]["metric"] == result["metric"]
    assert actual["check"]["exported"]["value"] == pytest.approx(result["pruned"], abs=1e-9)
    assert actual["check"]["exported"]["interval"] == pytest.approx(result["pruned_interval"])
    assert actual["check"]["difference"] <= actual["check"]["tolerance"] == 1e-4
    assert all(actual["latency"][name]["dense"] > 0 for name in ("batch_1", "batch_6"))
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert "logits (1, 3)" in program(tmp_path / "out")

    (entry,) = exports_of(own)
    assert (entry["of"], entry["runtime"], entry["out"]) == ("model", "onnx", str(tmp_path / "out"))
    card = (own / "model" / "README.md").read_text()
    assert "ONNX Runtime" in card
    assert "ONNX Runtime" not in before
    page = (own / "report.html").read_text()
    assert "ONNX Runtime" in page
    assert "onnxruntime.InferenceSession" in page

    # Once more is refused, and then replaces what was there.
    again = headprune("export", own, "--to", "onnx", "--out", tmp_path / "out")
    assert (again.code, "--overwrite" in again.err) == (2, True)
    again = headprune("export", own / "model", "--to", "onnx", "--out", tmp_path / "out", "--overwrite")
    assert again.code == 0, again.err
    assert "Outputs differ from PyTorch's by at most" in again.out
    assert len(exports_of(own)) == 1

    # A run that starts again forgets what was exported from it.
    done = headprune(*prune_command(dense, material().data_csv, own, *KEEP, "--seed", "3"), "--overwrite")
    assert done.code == 0, done.err
    assert exports_of(own) == []
    assert "ONNX Runtime" not in (own / "model" / "README.md").read_text()


def test_an_export_of_a_run_has_its_folder_there(
    dense: str, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = copied(run, tmp_path)
    card = own / "model" / "README.md"
    card.write_text(card.read_text() + "\nMine.\n")
    done = headprune("export", own, "--to", "onnx", "--json")
    assert done.code == 0, done.err
    assert done.json["out"] == str(own / "exports" / "onnx")
    assert (own / "exports" / "onnx" / "model.onnx").is_file()
    assert [entry["out"] for entry in exports_of(own)] == [str(own / "exports" / "onnx")]
    # What somebody wrote into the card is theirs.
    assert card.read_text().endswith("\nMine.\n")
    assert f"{card} was edited, so the export is not added to it." in caplog.messages
    quantised = ExportRequest(source=str(own / "model"), to="onnx", quantize="int8")
    assert quantised.target == own / "exports" / "onnx-int8"
    alone = headprune("export", dense, "--to", "onnx")
    assert (alone.code, "name a folder for the export with --out" in alone.err) == (2, True)


def test_quantised_by_openvino_of_other_data(run: Path, tmp_path: Path) -> None:
    own = copied(run, tmp_path)
    out = tmp_path / "out"
    asked = ("--quantize", "int8", "--data", material().data_tsv, "--samples", "10", "--max-drop", "1")
    done = headprune("export", own, "--to", "openvino", "--out", out, *asked, "--batch-size", "4", "--json")
    assert done.code == 0, done.err
    assert "batch_4" in done.json["latency"]
    actual = done.json
    assert (actual["quantize"], actual["check"]["samples"], actual["check"]["tolerance"]) == ("int8", 10, None)
    assert actual["check"]["difference"] > 0
    nodes = openvino.Core().read_model(out / "model.xml").get_ops()
    constants = [node for node in nodes if node.type_info.name == "Constant"]
    assert "i8" in {op.get_element_type().get_type_name() for op in constants}


def test_a_model_without_a_run_and_without_data(dense: str, tmp_path: Path) -> None:
    """Inputs are made up: they show that the program is right, and measure nothing."""
    done = headprune("export", dense, "--to", "onnx", "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert done.json["check"]["metric"] == "fidelity"
    assert "speedup" not in done.json["latency"]["batch_1"]


def test_bad_input_is_one_sentence_and_writes_nothing(dense: str, run: Path, tmp_path: Path) -> None:
    own = copied(run, tmp_path)
    broken = tmp_path / "unfinished"
    shutil.copytree(run, broken)
    record = json.loads((broken / "run.json").read_text())
    del record["result"]
    (broken / "run.json").write_text(json.dumps(record))
    moved = json.loads((own / "run.json").read_text())
    moved["settings"]["data"] = str(tmp_path / "gone.csv")
    cases = [
        ((own, "--to", "tensorrt"), "There is no runtime 'tensorrt'"),
        ((own, "--to", "onnx", "--quantize", "q4_0"), "has no quantisation 'q4_0'"),
        ((own, "--to", "gguf"), "cannot be exported to GGUF"),
        ((tmp_path / "nothing", "--to", "onnx"), "There is no directory"),
        ((broken, "--to", "onnx"), "is not finished"),
        ((own, "--to", "onnx", "--data", tmp_path / "no.csv"), "no.csv"),
        ((own, "--to", "onnx", "--dense", tmp_path / "no"), "There is no directory"),
        ((dense, "--to", "onnx", "--quantize", "int8"), "name some with --data"),
        ((own, "--to", "onnx", "--metric", "perplexity"), "perplexity does not fit"),
    ]
    for arguments, reason in cases:
        done = headprune("export", *arguments, "--out", tmp_path / "out")
        assert (done.code, reason in done.err) == (2, True), done.err
        assert done.err.count("\n") == 1, done.err
        assert not (tmp_path / "out").exists()
    (own / "exports.json").write_text("{")
    done = headprune("export", own, "--to", "onnx", "--out", tmp_path / "out")
    assert (done.code, "is damaged" in done.err, (tmp_path / "out").exists()) == (2, True, False), done.err
    (own / "exports.json").unlink()
    (own / "run.json").write_text(json.dumps(moved))
    done = headprune("export", own, "--to", "onnx", "--out", tmp_path / "out")
    assert (done.code, "does not exist any more" in done.err) == (2, True), done.err
    assert exports_of(own) == []


def test_the_samples_are_those_of_the_evaluation(run: Path, tmp_path: Path) -> None:
    """Slowly: the accuracy of the saved model on rows that the run did not calibrate on, by transformers alone."""
    from headprune.runs.experiment import experiment_of
    from headprune.runs.exports import ExportRequest, _batches
    from headprune.runs.loading import read_examples
    from headprune.runs.splits import split_data

    model = package.load(run / "model", dtype=torch.float32)
    request = ExportRequest(source=str(run), to="onnx", out=tmp_path / "out")
    batches = _batches(request, model, task_of(model))
    experiment = experiment_of(json.loads((run / "run.json").read_text()))
    _, wanted = split_data(experiment, read_examples(experiment, model, task_of(model), experiment.data))
    assert wanted is not None
    ids = [row["input_ids"].tolist() for row in wanted.rows]
    actual = [
        row[mask.bool()].tolist()
        for b in batches
        for row, mask in zip(b["input_ids"], b["attention_mask"], strict=True)
    ]
    assert sorted(actual) == sorted(ids)
    plain = AutoModelForSequenceClassification.from_pretrained(run / "model", trust_remote_code=True).eval()
    with torch.no_grad():
        right = [
            plain(**{k: v for k, v in b.items() if k != "labels"}).logits.argmax(-1) == b["labels"] for b in batches
        ]
    result = json.loads((run / "run.json").read_text())["result"]
    assert float(torch.cat(right).float().mean()) == pytest.approx(result["pruned"])
