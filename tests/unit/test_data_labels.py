"""Labels: names or numbers, several at once, numbers to predict; what is missing or does not fit is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers

from headprune.data import Columns, load_examples
from headprune.data.labels import class_ids
from headprune.errors import DataError
from run_helpers import bert, material, write_rows


def named(names: dict[str, int], **settings: Any) -> Any:
    id2label = {number: name for name, number in names.items()}
    return bert(num_labels=len(names), label2id=names, id2label=id2label, **settings)


def labels_of(model: Any, path: Path, values: list[Any], **options: Any) -> list[Any]:
    rows = [{"text": f"w5 w{6 + number}", "label": value} for number, value in enumerate(values)]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        write_rows(path, rows)
    examples = load_examples(model, path, processor=material().bert, **options)
    return [row["labels"].tolist() for row in examples.rows]


# --- names or numbers ---


def readings(names: dict[str, int], values: list[Any]) -> tuple[list[int] | None, list[int] | None]:
    """By name and by number, one value at a time; None where one of them cannot be read so."""
    by_name = [names[str(value)] for value in values] if all(str(value) in names for value in values) else None
    whole = [int(value) for value in values]
    return by_name, whole if all(0 <= number < len(names) for number in whole) else None


@pytest.mark.parametrize("first", [0, 1, 2])
def test_names_that_look_like_numbers(first: int, tmp_path: Path) -> None:
    """Three labels called 0 1 2, or 1 2 3, or 2 3 4: every column of two rows, against the slow rule."""
    names = {str(first + number): number for number in range(3)}
    config = named(names).config
    for values in itertools.product(range(-1, 6), repeat=2):
        by_name, by_number = readings(names, list(values))
        for typed in (True, False):
            if by_name is None and by_number is None:
                with pytest.raises(DataError, match="'label'"):
                    class_ids(config, values, "label", typed=typed)
            elif None not in (by_name, by_number) and by_name != by_number and not typed:
                with pytest.raises(DataError, match='"1" is a name and 1 a number'):
                    class_ids(config, values, "label", typed=typed)
            else:
                # A typed whole number is a number where it can be one.
                expected = by_name if by_number is None else by_number
                assert class_ids(config, values, "label", typed=typed) == expected, (values, typed)


def test_numbers_where_labels_are_called_by_the_next_number(tmp_path: Path) -> None:
    model = named({"1": 0, "2": 1})
    assert labels_of(model, tmp_path / "numbers.csv", [0, 1, 1]) == [0, 1, 1]
    assert labels_of(model, tmp_path / "names.csv", [1, 2, 2]) == [0, 1, 1]
    assert labels_of(model, tmp_path / "typed.jsonl", [1, 1]) == [1, 1]
    assert labels_of(model, tmp_path / "names.jsonl", ["1", "1"]) == [0, 0]
    with pytest.raises(DataError, match="holds 1, which can be names"):
        labels_of(model, tmp_path / "either.csv", [1, 1])


def test_all_numbers_from_zero_on_are_numbers(tmp_path: Path) -> None:
    """Labels called 0 and 1 that are numbered the other way round: only strings that are strings are names."""
    model = named({"0": 1, "1": 0})
    assert labels_of(model, tmp_path / "x.csv", [0, 1, 1]) == [0, 1, 1]
    assert labels_of(model, tmp_path / "x.jsonl", ["0", "1", "1"]) == [1, 0, 0]


def test_generic_names_are_names_and_numbers_are_numbers(tmp_path: Path) -> None:
    model = bert()
    assert labels_of(model, tmp_path / "x.csv", ["LABEL_2", "LABEL_0"]) == [2, 0]
    assert labels_of(model, tmp_path / "y.csv", [2, 0]) == [2, 0]


def test_truth_values(tmp_path: Path) -> None:
    assert labels_of(named({"true": 0, "false": 1}), tmp_path / "x.jsonl", [True, False]) == [0, 1]
    assert labels_of(named({"no": 0, "yes": 1}), tmp_path / "y.jsonl", [True, False]) == [1, 0]
    for form in ("true false", "True False", "TRUE FALSE"):
        true, false = form.split()
        assert labels_of(named({true: 0, false: 1}), tmp_path / "x.csv", [true, false]) == [0, 1]
        assert labels_of(bert(), tmp_path / "y.csv", [true, false]) == [1, 0]


def test_a_mixture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the name 'no' in row 1 and the number 1 in row 0"):
        labels_of(named({"no": 0, "yes": 1}), tmp_path / "x.jsonl", [1, "no"])


@pytest.mark.parametrize("loaded", ["parquet", "by-name"])
def test_a_data_set_that_names_its_numbers(loaded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its 0 is the model's 1: the names decide, if the model has them."""
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["sad", "glad"])}
    )
    data = datasets.Dataset.from_dict({"text": ["w5", "w6", "w7"], "label": [0, 1, 1]}, features=features)
    data.to_parquet(tmp_path / "x.parquet")
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: data)
    source = tmp_path / "x.parquet" if loaded == "parquet" else "someone/moods"
    for names, expected in (
        ({"glad": 0, "sad": 1}, [1, 0, 0]),
        ({"sad": 0, "glad": 1}, [0, 1, 1]),
        ({"LABEL_0": 0, "LABEL_1": 1}, [0, 1, 1]),
        ({"SAD": 1, "glad": 0}, [0, 1, 1]),
    ):
        rows = load_examples(named(names), source, processor=material().bert).rows
        assert [int(row["labels"]) for row in rows] == expected, names


def test_tags_of_a_data_set_that_names_them(tmp_path: Path) -> None:
    tags = datasets.Sequence(datasets.ClassLabel(names=["PER", "O"]))
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("string")), "tags": tags})
    data = datasets.Dataset.from_dict({"tokens": [["w5", "w6", "w7"]], "tags": [[0, -100, 1]]}, features=features)
    data.to_parquet(tmp_path / "x.parquet")
    names = {"O": 0, "PER": 1}
    model = bert(transformers.BertForTokenClassification, num_labels=2, label2id=names, id2label={0: "O", 1: "PER"})
    (row,) = load_examples(model, tmp_path / "x.parquet", processor=material().bert).rows
    assert row["labels"].tolist() == [-100, 1, -100, 0, -100]


@pytest.mark.parametrize("gap", [None, float("nan"), "", "  "])
def test_a_missing_label_is_named(gap: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Row 1 of column 'label' has no label"):
        labels_of(bert(), tmp_path / "x.jsonl", [0, gap, 1])
    with pytest.raises(DataError, match="Row 1 of column 'label' has no number"):
        labels_of(bert(num_labels=1), tmp_path / "y.jsonl", [0.5, gap, 1])


def test_a_short_row_has_no_label(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("text,label\nw5 w6,1\nw7\n")
    with pytest.raises(DataError, match="Row 1 of column 'label' has no label"):
        load_examples(bert(), tmp_path / "x.csv", processor=material().bert)


# --- several at once ---

MOODS = {"glad": 0, "sad": 1, "torn, or so": 2}


def several(**settings: Any) -> Any:
    return named(MOODS, **{"problem_type": "multi_label_classification", **settings})


@pytest.mark.parametrize(
    ("suffix", "values"),
    [
        ("jsonl", [["glad", "torn, or so"], [], ["sad"]]),
        ("jsonl", [[0, 2], [], [1]]),
        ("jsonl", [[1, 0, 1], [0, 0, 0], [0, 1, 0]]),
        ("jsonl", [[True, False, True], [False] * 3, [False, True, False]]),
        ("parquet", [["glad", "torn, or so"], [], ["sad"]]),
        ("csv", ["glad; torn, or so", "", "sad"]),
        ("csv", ["glad|torn, or so", "", "sad"]),
        ("csv", ["0,2", "", "1"]),
        ("csv", ['["glad", "torn, or so"]', "[]", '["sad"]']),
        ("tsv", ["0;2", "", "1"]),
    ],
)
def test_several_labels_per_row(suffix: str, values: list[Any], tmp_path: Path) -> None:
    actual = labels_of(several(), tmp_path / f"x.{suffix}", values)
    assert actual == [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]]


def test_a_name_with_a_comma_is_one_name(tmp_path: Path) -> None:
    assert labels_of(several(), tmp_path / "x.tsv", ["torn, or so", "sad"]) == [[0, 0, 1], [0, 1, 0]]


def test_a_column_of_flags_per_label(tmp_path: Path) -> None:
    rows = [
        {"text": "w5", "glad": 1, "sad": 0, "torn, or so": 1},
        {"text": "w6", "glad": 0, "sad": 1, "torn, or so": 0},
    ]
    write_rows(tmp_path / "x.csv", rows)
    actual = load_examples(several(), tmp_path / "x.csv", processor=material().bert).rows
    assert [row["labels"].tolist() for row in actual] == [[1, 0, 1], [0, 1, 0]]


def test_lists_make_a_silent_model_one_of_several_labels(tmp_path: Path) -> None:
    """transformers decides by the kind of the labels where the config does not."""
    model = named(MOODS)
    rows = [{"text": "w5", "label": ["sad", "glad"]}, {"text": "w6", "label": []}]
    write_rows(tmp_path / "x.jsonl", rows)
    (batch,) = load_examples(model, tmp_path / "x.jsonl", processor=material().bert).batches(2)
    assert batch["labels"].tolist() == [[1, 1, 0], [0, 0, 0]]
    assert model(**batch).loss.isfinite()
    assert model.config.problem_type == "multi_label_classification"


def test_one_wrong_label_of_several(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Label 'mad' in row 1"):
        labels_of(several(), tmp_path / "x.jsonl", [["sad"], ["glad", "mad"]])
    with pytest.raises(DataError, match="Label 3 in row 0"):
        labels_of(several(), tmp_path / "y.jsonl", [[0, 3], []])


# --- numbers to predict ---


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_several_numbers_per_row(suffix: str, tmp_path: Path) -> None:
    values: list[Any] = [[0.5, -1.0], [2, 3.25]]
    if suffix == "csv":
        values = [json.dumps(value) for value in values]
    model = bert(num_labels=2, problem_type="regression")
    assert labels_of(model, tmp_path / f"x.{suffix}", values) == [[0.5, -1.0], [2.0, 3.25]]


def test_another_count_of_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Row 1 of column 'label' has 3 numbers, but the model predicts 2"):
        labels_of(bert(num_labels=2, problem_type="regression"), tmp_path / "x.jsonl", [[1, 2], [1, 2, 3]])


def test_flags_do_not_count_as_length(tmp_path: Path) -> None:
    """A batch is sorted by its tokens: labels that are longer than any text must not level them."""
    names = {f"n{number}": number for number in range(40)}
    model = named(names, problem_type="multi_label_classification")
    texts = ["w5 w6 w7", "w5", "w5 w6"]
    write_rows(tmp_path / "x.jsonl", [{"text": text, "label": ["n3"]} for text in texts])
    examples = load_examples(model, tmp_path / "x.jsonl", processor=material().bert, columns=Columns())
    assert examples.order() == [1, 2, 0]
    assert torch.stack([row["labels"] for row in examples.rows]).sum() == 3
