"""`evaluate`: numbers against plain loops, closed forms and scikit-learn, and rows that a run has used."""

from __future__ import annotations

import copy
import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score

import headprune
import run_helpers
from headprune.errors import DataError, RunError
from run_helpers import COLOURS, ROWS, classifier, material, prune_command, sentences, tokenizer, write_rows
from zoo import ZOO

Z = 1.959963984540054


def predictions(model: Any, texts: list[str]) -> list[int]:
    """One text at a time."""
    with torch.no_grad():
        return [int(model(**tokenizer()(text, return_tensors="pt")).logits.argmax()) for text in texts]


def rows_in(path: str | Path) -> list[tuple[str, int]]:
    with open(path) as file:
        return [(row["text"], COLOURS.index(row["label"])) for row in csv.DictReader(file)]


def smaller(model: Any) -> Any:
    return headprune.remove(copy.deepcopy(model), [(0, 0), (1, 1), (1, 2), (2, 3)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It calibrates on 8 rows of the 36, chooses by 10 others, and has seen none of the 18 that are left."""
    out = tmp_path_factory.mktemp("evaluated") / "run"
    m = material()
    done = run_helpers.headprune(*prune_command(m.bert, m.data_csv, out, "--keep", "0.5", "--evaluation-samples", "10"))
    assert done.code == 0, done.err
    return out


@pytest.fixture(scope="module")
def unseen() -> list[int]:
    """The places of these 18 rows: two draws of a permutation by the seed, as docs/data.md says."""

    def permuted(count: int) -> list[int]:
        return torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()

    rest = sorted(permuted(ROWS)[8:])
    chosen = {rest[place] for place in permuted(len(rest))[:10]}
    return [row for row in rest if row not in chosen]


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_numbers_are_those_of_a_plain_loop() -> None:
    dense = classifier()
    model = smaller(dense)
    texts = sentences(40, seed=5)
    labels = [(label + (place % 4 == 0)) % 3 for place, label in enumerate(predictions(dense, texts))]
    encoded = [tokenizer()(texts[start : start + 8], padding=True, return_tensors="pt") for start in range(0, 40, 8)]
    batches = [{**one, "labels": torch.tensor(labels[8 * place : 8 * place + 8])} for place, one in enumerate(encoded)]
    result = headprune.evaluate(model, batches, dense=dense)
    mine, theirs = predictions(model, texts), predictions(dense, texts)
    assert len(set(mine)) > 1
    assert mine != theirs
    assert result.samples == 40
    assert result.metric.name == "accuracy"
    assert result.value == result.model.value == accuracy_score(labels, mine)
    assert result.dense is not None
    assert result.dense.value == accuracy_score(labels, theirs) == 0.75
    # Wilson's interval, as the solution of |p - share| = z sqrt(p (1 - p) / n).
    for row in (result.model, result.dense):
        assert row.interval is not None
        for end in row.interval:
            assert abs(end - row.value) == pytest.approx(Z * math.sqrt(end * (1 - end) / 40), abs=1e-9)
    gap = [float(a == label) - float(b == label) for a, b, label in zip(mine, theirs, labels, strict=True)]
    assert result.difference is not None
    assert result.difference.value == pytest.approx(sum(gap) / 40)
    padded = torch.tensor([*gap, 1.0, -1.0]).double()  # Agresti and Min
    half = Z * float(padded.std()) / math.sqrt(42)
    assert result.difference.low == pytest.approx(float(padded.mean()) - half)
    assert result.difference.high == pytest.approx(float(padded.mean()) + half)
    assert result.agreement == pytest.approx(sum(a == b for a, b in zip(mine, theirs, strict=True)) / 40)
    assert result.model.parameters == sum(p.numel() for p in model.parameters()) < result.dense.parameters
    assert headprune.evaluate(model, batches, metric="f1").value == pytest.approx(
        f1_score(labels, mine, average="macro")
    )


def test_the_perplexity_of_a_language_model_is_that_of_its_losses() -> None:
    dense = ZOO["gpt2"].build()
    model = headprune.remove(copy.deepcopy(dense), [(0, 0), (1, 1)])
    batches = [{"input_ids": torch.randint(5, 50, (3, 9), generator=torch.Generator().manual_seed(n))} for n in (0, 1)]
    result = headprune.evaluate(model, batches, dense=dense)

    def loss(one: Any) -> float:
        with torch.no_grad():
            return sum(float(one(**batch, labels=batch["input_ids"]).loss) for batch in batches) / 2

    assert result.metric.name == "perplexity"
    assert result.value == pytest.approx(math.exp(loss(model)), rel=1e-5)
    assert result.difference is not None
    assert result.difference.value == pytest.approx(loss(model) - loss(dense), abs=1e-5)  # of logarithms


def test_a_function_as_metric_has_no_interval() -> None:
    def errors(labels: Any, said: Any) -> float:
        return float((labels != said).sum())

    batch = {"input_ids": torch.randint(5, 50, (6, 7)), "labels": torch.tensor([0, 1, 2, 0, 1, 2])}
    dense = classifier()
    result = headprune.evaluate(smaller(dense), [batch], dense=dense, metric=errors)
    with torch.no_grad():
        assert result.dense is not None
        assert result.dense.value == float((dense(batch["input_ids"]).logits.argmax(-1) != batch["labels"]).sum())
    assert result.interval is None
    assert result.difference is None


def test_without_labels_it_is_fidelity_to_the_dense_model() -> None:
    batch = {"input_ids": torch.randint(5, 50, (12, 7))}
    dense = classifier()
    model = smaller(dense)
    result = headprune.evaluate(model, [batch], dense=dense)
    with torch.no_grad():
        same = dense(**batch).logits.argmax(-1) == model(**batch).logits.argmax(-1)
    assert result.metric.name == "fidelity"
    assert result.value == result.agreement == pytest.approx(float(same.float().mean()))
    with pytest.raises(DataError, match="there is none; name it with --dense"):
        headprune.evaluate(model, [batch])


# --- rows that a run has used ----------------------------------------------------------------------------------------


def test_rows_that_a_run_used_do_not_evaluate_it(run: Path, unseen: list[int]) -> None:
    rows = rows_in(material().data_csv)
    texts, labels = [rows[place][0] for place in unseen], [rows[place][1] for place in unseen]
    result = headprune.evaluate(run, material().data_csv)
    assert result.samples == len(unseen) == 18
    assert result.value == accuracy_score(labels, predictions(headprune.load(run), texts))
    assert result.dense is not None
    assert result.dense.value == accuracy_score(labels, predictions(classifier(), texts))
    assert result.dense.name == material().bert
    (note,) = result.notes
    assert note.startswith(f"18 of the 36 rows of {material().data_csv} calibrated, trained or selected")
    assert headprune.evaluate(run / "model", material().data_csv, samples=5).samples == 5


def test_used_rows_are_known_in_another_file_too(run: Path, unseen: list[int], tmp_path: Path) -> None:
    rows = rows_in(material().data_csv)
    shuffled = [{"text": rows[place][0], "label": COLOURS[rows[place][1]]} for place in reversed(range(ROWS))]
    other = [{"text": text, "label": "red"} for text in sentences(4, seed=77)]
    file = write_rows(tmp_path / "other.jsonl", [*shuffled, *other])
    assert headprune.evaluate(run, file).samples == 18 + 4
    only = write_rows(tmp_path / "used.csv", [row for n, row in enumerate(reversed(shuffled)) if n not in unseen])
    with pytest.raises(DataError, match=r"All 18 rows of .*used\.csv calibrated, trained or selected the model of"):
        headprune.evaluate(run, only)


def test_data_that_a_recovery_trained_on_does_not_evaluate_it(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    shutil.copytree(copied / "model", copied / "finetuned" / "model")
    trained = [{"text": text, "label": "red"} for text in sentences(6, seed=31)]
    fresh = [{"text": text, "label": "blue"} for text in sentences(5, seed=32)]
    settings = {"data": write_rows(tmp_path / "trained.csv", trained), "reading": {}}
    record = {"settings": settings, "versions": {"headprune": headprune.__version__}}
    (copied / "finetuned" / "finetune.json").write_text(json.dumps(record))
    file = write_rows(tmp_path / "test.csv", [*trained, *fresh])
    assert headprune.evaluate(copied / "finetuned", file).samples == 5
    assert headprune.evaluate(copied, file).samples == 11  # the pruned model has not seen them
    (copied / "finetuned" / "finetune.json").write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        headprune.evaluate(copied / "finetuned", file)


def test_what_cannot_be_known_any_more_is_said(tmp_path: Path) -> None:
    m = material()
    data, model, out = tmp_path / "data.csv", tmp_path / "bert", tmp_path / "run"
    shutil.copy(m.data_csv, data)
    shutil.copytree(m.bert, model)
    assert run_helpers.headprune(*prune_command(str(model), str(data), out, "--keep", "0.5")).code == 0
    with pytest.raises(DataError, match="All 36 rows"):
        headprune.evaluate(out, m.data_csv)  # the same content under another name
    data.write_text(data.read_text().replace("red", "blue"))
    result = headprune.evaluate(out, m.data_csv)
    assert result.samples == ROWS
    assert "has changed since, so rows of" in result.notes[0]
    data.unlink()
    assert "does not exist any more" in headprune.evaluate(out, m.data_csv).notes[0]
    shutil.rmtree(model)
    alone = headprune.evaluate(out, m.data_csv)
    assert alone.dense is None
    assert alone.value == result.value
    shutil.copytree(m.wide, model)
    with pytest.raises(RunError, match=r"the model that .* started from, has changed since"):
        headprune.evaluate(out, m.data_csv)
    again = headprune.evaluate(out, m.data_csv, dense=m.bert)
    assert again.to_json()["dense"]["value"] == result.to_json()["dense"]["value"]


# --- the command line, and how results look --------------------------------------------------------------------------


def test_the_command_line_says_what_python_says(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = run_helpers.headprune("evaluate", run, "--data", material().data_csv, "--json")
    expected = headprune.evaluate(str(run), material().data_csv)
    assert done.code == 0
    assert done.json == expected.to_json()
    said = run_helpers.headprune("evaluate", run, "--data", material().data_csv)
    assert said.code == 0
    assert f"{expected.value:.2%}" in said.out
    assert f"{expected.agreement:.2%}" in said.out
    assert "18 of the 36 rows" in caplog.text
    alone = run_helpers.headprune("evaluate", material().bert, "--data", material().data_csv, "--json")
    assert alone.json["samples"] == ROWS
    assert alone.json["dense"] is alone.json["difference"] is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["RUN", "--data", "nowhere.csv"], "nowhere.csv"),
        (["./nowhere", "--data", "DATA"], "There is no directory ./nowhere"),
        (["RUN", "--data", "DATA", "--dense", "./nowhere"], "There is no directory ./nowhere"),
        (["RUN", "--data", "DATA", "--metric", "acuracy"], "did you mean 'accuracy'"),
    ],
)
def test_bad_input_is_one_sentence(run: Path, arguments: list[str], sentence: str) -> None:
    places = {"RUN": str(run), "DATA": material().data_csv}
    done = run_helpers.headprune("evaluate", *(places.get(word, word) for word in arguments))
    assert done.code == 2
    assert sentence in done.err
    assert done.out == ""


def test_bad_input_from_python_is_one_sentence() -> None:
    model, batch = classifier(), {"input_ids": torch.randint(5, 50, (2, 7))}
    with pytest.raises(DataError, match="does not say where its tokenizer"):
        headprune.evaluate(model, material().data_csv)
    assert headprune.evaluate(model, material().data_csv, processor=material().bert).samples == ROWS
    with pytest.raises(DataError, match="samples= draws from a file"):
        headprune.evaluate(model, [batch], samples=1)
    with pytest.raises(DataError, match="no batches to evaluate on"):
        headprune.evaluate(model, [])
    with pytest.raises(DataError, match="vocabularies of 61 and 70 tokens"):
        headprune.evaluate(model, [batch], dense=classifier(vocab_size=70))


def test_a_result_shows_itself(run: Path) -> None:
    result = headprune.evaluate(run, material().data_csv)
    assert repr(result).startswith(f"<EvaluateResult: accuracy {result.value:.4g} [")
    frame = result.to_frame()
    assert result.dense is not None
    assert frame["value"].tolist() == [result.dense.value, result.value]
    page = result._repr_html_()
    assert f"<td style='text-align:right'>{result.value:.4g}</td>" in page
    assert f"{result.model.parameters:,}" in page
    assert "<script" not in page
