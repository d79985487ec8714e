"""From files to batches: every format, pairs, language-model blocks, masking, buckets, splits, labels, images."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers

from headprune.data import Columns, Examples, load_examples
from headprune.data.batching import OVERHEAD
from headprune.data.tables import read_table
from headprune.errors import DataError
from headprune.runs.experiment import Experiment, load, with_earlier_defaults
from headprune.runs.splits import split_data
from oracles import IGNORED
from run_helpers import COLOURS, ROWS, WORDS, bert, classifier, material, sentences, tokenizer, write_rows
from zoo import LABELS, ZOO

CLS, PAD, SEP, UNK, MASK = range(5)


def word_ids(text: str) -> list[int]:
    return [len((CLS, PAD, SEP, UNK, MASK)) + WORDS.index(word) for word in text.split()]


def ids(row: Any) -> list[int]:
    return row["input_ids"].tolist()


@pytest.fixture(scope="module")
def model() -> Any:
    return classifier()


# --- tables ---


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "json", "parquet"])
def test_every_table_gives_the_same_examples(suffix: str, model: Any) -> None:
    m = material()
    examples = load_examples(model, getattr(m, f"data_{suffix}"), processor=m.bert)
    texts = sentences(ROWS)
    assert [ids(row) for row in examples.rows] == [[CLS, *word_ids(text), SEP] for text in texts]
    assert examples.has_labels
    reference = load_examples(model, m.data_csv, processor=m.bert)
    assert [int(row["labels"]) for row in examples.rows] == [int(row["labels"]) for row in reference.rows]


def test_label_names_go_through_label2id(model: Any) -> None:
    m = material()
    named = read_table(m.data_csv)["label"]
    assert set(named) == set(COLOURS)
    rows = load_examples(model, m.data_csv, processor=m.bert).rows
    assert [int(row["labels"]) for row in rows] == [COLOURS.index(name) for name in named]


def test_numbers_are_labels_as_they_are(model: Any, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "numbers.csv", [{"text": "w5", "label": n} for n in (2, 0, 1)])
    assert [int(row["labels"]) for row in load_examples(model, data, processor=material().bert).rows] == [2, 0, 1]


def test_pairs_have_two_token_types(model: Any) -> None:
    m = material()
    examples = load_examples(model, m.pairs_tsv, processor=m.bert, columns=Columns(pair="second"))
    one, other = sentences(ROWS), sentences(ROWS, seed=1)
    for row, a, b in zip(examples.rows, one, other, strict=True):
        assert ids(row) == [CLS, *word_ids(a), SEP, *word_ids(b), SEP]
        split = len(word_ids(a)) + 2
        assert row["token_type_ids"].tolist() == [0] * split + [1] * (len(ids(row)) - split)


def test_usual_columns_are_found_and_others_can_be_named(model: Any, tmp_path: Path) -> None:
    m = material()
    data = write_rows(tmp_path / "odd.csv", [{"utterance": "w5 w6", "mood": "blue"}])
    columns = Columns(text="utterance", label="mood")
    (row,) = load_examples(model, data, processor=m.bert, columns=columns).rows
    assert ids(row) == [CLS, 5, 6, SEP]
    assert int(row["labels"]) == 2
    with pytest.raises(DataError, match="No text column was found; name it with --text-column: 'utterance', 'mood'"):
        load_examples(model, data, processor=m.bert)
    actual = load_examples(model, m.pairs_tsv, processor=m.bert)  # sentence1 and target
    assert ids(actual.rows[0]) == [CLS, *word_ids(sentences(1)[0]), SEP]
    assert actual.has_labels


def test_a_table_without_labels(model: Any) -> None:
    m = material()
    assert not load_examples(model, m.unlabelled_csv, processor=m.bert).has_labels


def test_text_that_looks_like_a_missing_value_or_a_quote_is_text(model: Any, tmp_path: Path) -> None:
    """Pandas would read NA, null and quotes as something else."""
    texts = ["NA", "null", '"w5', "w6"]
    (tmp_path / "odd.tsv").write_text("text\tlabel\n" + "".join(f"{text}\tred\n" for text in texts))
    assert read_table(tmp_path / "odd.tsv")["text"] == texts
    (tmp_path / "odd.csv").write_text('text,label\nNA,red\n"w5, w6",red\n')
    assert read_table(tmp_path / "odd.csv")["text"] == ["NA", "w5, w6"]


def test_long_texts_are_cut(model: Any, tmp_path: Path) -> None:
    m = material()
    data = write_rows(tmp_path / "long.csv", [{"text": " ".join(["w7"] * 300), "label": "red"}])
    for asked, expected in ((10, 10), (128, BERT_LIMIT), (4, 4)):
        (row,) = load_examples(model, data, processor=m.bert, max_length=asked).rows
        assert len(ids(row)) == expected
        assert (ids(row)[0], ids(row)[-1]) == (CLS, SEP)
    with pytest.raises(DataError, match="max_length must be at least 2, but it is 1"):
        load_examples(model, data, processor=m.bert, max_length=1)


BERT_LIMIT = 38  # 40 positions, less the two that RoBERTa's kin leave out


def test_regression_labels_are_numbers() -> None:
    m = material()
    rows = load_examples(bert(num_labels=1), m.numbers_csv, processor=m.regressor).rows
    assert all(row["labels"].is_floating_point() for row in rows)
    assert [float(row["labels"]) for row in rows[:3]] == pytest.approx([-3.0, -2.63, -2.26])


# --- language models ---


def test_plain_text_is_cut_into_blocks() -> None:
    m = material()
    text = word_ids(Path(m.words_txt).read_text())
    examples = load_examples(ZOO["gpt2"].build(), m.words_txt, processor=m.gpt2, max_length=8)
    blocks = [ids(row) for row in examples.rows]
    whole = [text[start : start + 8] for start in range(0, len(text), 8)]
    assert blocks == [block for block in whole if len(block) > 1]
    assert not examples.has_labels  # each token is the label of the one before


def test_a_last_block_of_one_token_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "nine.txt").write_text(" ".join(WORDS[:9]))
    examples = load_examples(ZOO["gpt2"].build(), tmp_path / "nine.txt", processor=material().gpt2, max_length=4)
    assert [len(ids(row)) for row in examples.rows] == [4, 4]
    (tmp_path / "one.txt").write_text("w5")
    with pytest.raises(DataError, match=r"one\.txt has no examples"):
        load_examples(ZOO["gpt2"].build(), tmp_path / "one.txt", processor=material().gpt2)


@pytest.mark.parametrize("model_class", ["BertModel", "BertForSequenceClassification"])
def test_every_line_is_a_text_for_encoders_and_classifiers(model_class: str, tmp_path: Path) -> None:
    lines = ["w5 w6", "w7", "w8 w9 w10"]
    (tmp_path / "texts.txt").write_text("\n \n".join(lines) + "\n")
    model = bert(getattr(transformers, model_class))
    examples = load_examples(model, tmp_path / "texts.txt", processor=material().bert, columns=Columns(text="title"))
    assert [ids(row) for row in examples.rows] == [[CLS, *word_ids(line), SEP] for line in lines]
    assert not examples.has_labels


def test_plain_text_is_too_little_for_a_question(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("w5 w6")
    model = bert(transformers.BertForQuestionAnswering)
    with pytest.raises(DataError, match="task 'question-answering' needs more than plain text"):
        load_examples(model, tmp_path / "texts.txt", processor=material().bert)


def masked_rows(seed: int, max_length: int = 20) -> list[Any]:
    m = material()
    from transformers import BertForMaskedLM

    model = bert(BertForMaskedLM)
    return list(load_examples(model, m.words_txt, processor=m.masked, max_length=max_length, seed=seed).rows)


def test_masking_hides_some_tokens_and_asks_for_them() -> None:
    text = word_ids(Path(material().words_txt).read_text())
    hidden = total = 0
    for number, row in enumerate(masked_rows(0)):
        original = text[20 * number : 20 * number + 20]
        for before, now, label in zip(original, ids(row), row["labels"].tolist(), strict=True):
            if now == MASK:
                assert label == before
                hidden += 1
            else:
                assert (now, label) == (before, IGNORED)
            total += 1
        assert (row["labels"] != IGNORED).any()
    assert 0.05 < hidden / total < 0.3  # 15 % of the tokens, by chance


def test_masking_is_seeded() -> None:
    one, same, other = masked_rows(3), masked_rows(3), masked_rows(4)
    assert [ids(row) for row in one] == [ids(row) for row in same]
    assert [ids(row) for row in one] != [ids(row) for row in other]


def test_special_tokens_are_not_masked() -> None:
    from transformers import BertForMaskedLM

    m = material()
    for seed in range(5):
        for row in load_examples(bert(BertForMaskedLM), m.data_csv, processor=m.masked, seed=seed).rows:
            assert (ids(row)[0], ids(row)[-1]) == (CLS, SEP)
            assert row["labels"][0] == row["labels"][-1] == IGNORED


def test_a_row_without_any_token_for_a_language_model(tmp_path: Path) -> None:
    """A blank line in a table: there is nothing to predict, and nothing must break."""
    tokens = tokenizer(token_types=False)
    tokens._tokenizer.post_processor = None  # as GPT-2's: no tokens of its own
    tokens.save_pretrained(tmp_path / "plain")
    data = write_rows(tmp_path / "blank.csv", [{"text": text} for text in ("w5 w6 w7", "", "w8 w9")])
    try:
        examples = load_examples(ZOO["gpt2"].build(), data, processor=tmp_path / "plain")
    except DataError as error:
        assert "row 1" in str(error)  # noqa: PT017  (either answer will do, but not a batch that no model takes)
    else:
        for batch in examples.batches(8):
            assert not batch["input_ids"].is_floating_point()
            assert (batch["attention_mask"].sum(1) > 0).all()


def test_targets_of_an_encoder_decoder_are_text(tmp_path: Path) -> None:
    m = material()
    data = write_rows(tmp_path / "translate.csv", [{"text": "w5 w6", "label": "w9 w8 w7"}])
    (row,) = load_examples(ZOO["bart"].build(), data, processor=m.bert).rows
    assert row["labels"].tolist() == [CLS, 9, 8, 7, SEP]


# --- batches ---


def some_examples(lengths: list[int]) -> Examples:
    rows = [
        {"input_ids": torch.full((n,), number + 5), "attention_mask": torch.ones(n, dtype=torch.long)}
        for number, n in enumerate(lengths)
    ]
    return Examples([{**row, "labels": torch.tensor(number)} for number, row in enumerate(rows)], {"input_ids": PAD})


def test_neighbours_have_like_lengths() -> None:
    examples = some_examples([9, 2, 5, 3, 9, 4, 2])
    batches = examples.batches(3)
    assert [batch["input_ids"].shape[1] for batch in batches] == [3, 5, 9]
    assert [batch["labels"].tolist() for batch in batches] == [[1, 6, 3], [5, 2], [0, 4]]
    padding = sum(int((batch["attention_mask"] == 0).sum()) for batch in batches)
    assert padding == 2 + 1


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize(
    "lengths", [[2, 2, 2, 40, 41, 90, 90], [3, 200, 201, 202, 400], [7] * 8, [1, 2, 3, 4, 5, 6, 7, 8], [5]]
)
def test_no_other_cuts_waste_less_on_padding(lengths: list[int], size: int) -> None:
    """Against all ways to cut: padding counts by tokens, a batch more as the longest sample, or OVERHEAD."""
    overhead = max(OVERHEAD, lengths[-1])

    def cost(sizes: list[int]) -> int:
        ends = list(itertools.accumulate(sizes))
        return sum(overhead + lengths[end - 1] * count for end, count in zip(ends, sizes, strict=True))

    def ways(left: int) -> Iterator[list[int]]:
        if not left:
            yield []
        for count in range(1, min(size, left) + 1):
            yield from ([count, *others] for others in ways(left - count))

    actual = [len(batch["labels"]) for batch in some_examples(lengths).batches(size)]
    assert max(actual) <= size
    assert cost(actual) == min(map(cost, ways(len(lengths))))


def test_full_batches_have_as_many_samples_as_there_are() -> None:
    batches = some_examples([2, 2, 2, 40, 41, 90, 90]).batches(3, full=True)
    assert [len(batch["labels"]) for batch in batches] == [3, 3, 1]
    assert [batch["input_ids"].shape[1] for batch in batches] == [2, 90, 90]


def test_the_longest_samples_make_a_full_batch() -> None:
    batch = some_examples([2, 90, 2, 40, 41, 90]).longest(3)
    assert batch["labels"].tolist() == [4, 1, 5]
    assert len(some_examples([2, 3]).longest(8)["labels"]) == 2


def test_samples_of_one_length_fill_their_batches() -> None:
    assert [len(batch["labels"]) for batch in some_examples([4] * 8).batches(3)] == [3, 3, 2]
    assert [len(batch["labels"]) for batch in some_examples([4] * 8 + [5]).batches(3)] == [3, 3, 3]


def test_padding_is_masked_and_filled() -> None:
    (batch,) = some_examples([2, 4]).batches(8)
    assert batch["input_ids"].tolist() == [[5, 5, PAD, PAD], [6, 6, 6, 6]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_labels_of_tokens_are_padded_with_what_does_not_count() -> None:
    rows = [{"input_ids": torch.ones(n).long(), "labels": torch.ones(n).long()} for n in (1, 3)]
    (batch,) = Examples(rows, {}).batches(2)
    assert batch["labels"].tolist() == [[1, IGNORED, IGNORED], [1, 1, 1]]


def test_every_example_is_in_one_batch() -> None:
    examples = some_examples([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])
    for size in (1, 2, 4, 50):
        seen = [label for batch in examples.batches(size) for label in batch["labels"].tolist()]
        assert sorted(seen) == list(range(11))
        assert seen == examples.order()
    with pytest.raises(DataError, match="batch size is 0"):
        examples.batches(0)


def labels_in(examples: Examples) -> list[int]:
    return [int(row["labels"]) for row in examples.rows]


def test_a_split_parts_the_examples() -> None:
    examples = some_examples([3] * 20)
    drawn, rest = examples.split(7, seed=1)
    assert len(drawn) == 7
    assert sorted(labels_in(drawn) + labels_in(rest)) == list(range(20))
    assert labels_in(drawn) == sorted(labels_in(drawn))  # in their order
    assert labels_in(examples.split(7, seed=1)[0]) == labels_in(drawn)
    assert labels_in(examples.split(7, seed=2)[0]) != labels_in(drawn)


def test_a_sample_is_seeded_and_at_most_everything() -> None:
    examples = some_examples([3] * 20)
    assert labels_in(examples.sample(5, seed=4)) == labels_in(examples.sample(5, seed=4))
    assert labels_in(examples.sample(99, seed=4)) == list(range(20))
    assert labels_in(examples.sample(None, seed=4)) == list(range(20))
    with pytest.raises(DataError, match="The number of samples must be at least 1, but it is 0"):
        examples.sample(0, seed=1)


def experiment(**options: Any) -> Experiment:
    m = material()
    return Experiment(**{"model": m.bert, "data": m.data_csv, "calibration_samples": 8, **options})


def texts_in(examples: Examples) -> list[tuple[int, ...]]:
    return [tuple(ids(row)) for row in examples.rows]


def test_calibration_and_evaluation_are_apart() -> None:
    _, calibration, evaluation = load(experiment())
    assert (len(calibration), len(evaluation)) == (8, ROWS - 8)
    assert set(texts_in(calibration)).isdisjoint(texts_in(evaluation))
    _, again, _ = load(experiment())
    _, other, _ = load(experiment(seed=1))
    assert texts_in(again) == texts_in(calibration) != texts_in(other)


def test_little_data_is_shared_out_in_halves() -> None:
    _, calibration, evaluation = load(experiment(calibration_samples=128))
    assert (len(calibration), len(evaluation)) == (ROWS // 2, ROWS // 2)


@pytest.mark.parametrize(
    ("rows", "calibration"), [(3, 1), (36, 18), (200, 100), (256, 128), (400, 128), (600, 180), (872, 256), (9000, 256)]
)
def test_by_default_a_file_spares_what_it_can_for_calibration(rows: int, calibration: int) -> None:
    """30 % of the rows, from 128, or half of few, up to 256."""
    examples = some_examples([3] * rows)
    chosen, rest = split_data(experiment(calibration_samples=None), examples)
    assert (len(chosen), len(rest)) == (calibration, rows - calibration)
    assert sorted(labels_in(chosen) + labels_in(rest)) == list(range(rows))


def test_by_default_256_rows_of_another_file_calibrate(tmp_path: Path) -> None:
    texts = [{"text": f"w5 {WORDS[number % len(WORDS)]}", "label": "red"} for number in range(300)]
    other = write_rows(tmp_path / "other.csv", texts)
    _, calibration, evaluation = load(experiment(calibration=other, calibration_samples=None))
    assert (len(calibration), len(evaluation)) == (256, ROWS)


def test_a_run_of_an_earlier_version_resumes_with_its_128_samples(tmp_path: Path) -> None:
    record = {"settings": {"calibration_samples": 128, "rescore": "auto"}, "versions": {"headprune": "0.1"}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert with_earlier_defaults(experiment(calibration_samples=None), tmp_path).calibration_samples == 128
    assert with_earlier_defaults(experiment(calibration_samples=64), tmp_path).calibration_samples == 64
    (tmp_path / "run.json").write_text(json.dumps({**record, "settings": {"calibration_samples": 64}}))
    assert with_earlier_defaults(experiment(calibration_samples=None), tmp_path).calibration_samples is None


@pytest.mark.parametrize("name", ["other.csv", "other.txt"])
def test_texts_without_labels_calibrate(name: str, tmp_path: Path) -> None:
    """Although --label-column names a column of the data that they do not have."""
    texts = [f"w5 {word}" for word in WORDS[:10]]
    other = tmp_path / name
    other.write_text("\n".join(["text", *texts] if name.endswith("csv") else texts) + "\n")
    labelled = write_rows(tmp_path / "data.csv", [{"text": f"w6 {word}", "colour": "red"} for word in WORDS[:10]])
    settings = {"data": labelled, "label_column": "colour", "calibration": str(other), "calibration_samples": 4}
    _, calibration, evaluation = load(experiment(**settings))
    assert not calibration.has_labels
    assert evaluation.has_labels
    assert all(text[:2] == (CLS, 5) for text in texts_in(calibration))
    assert all(text[:2] == (CLS, 6) for text in texts_in(evaluation))
    settings["criterion"] = "his"  # by the gradient of the loss
    with pytest.raises(DataError, match=r"'his' needs labels|no label column 'colour'"):
        load(experiment(**settings))
    assert not load(experiment(**settings, labels="self"))[1].has_labels


def test_evaluation_samples_are_drawn_from_the_rest() -> None:
    _, calibration, evaluation = load(experiment(evaluation_samples=5))
    assert (len(calibration), len(evaluation)) == (8, 5)
    assert set(texts_in(calibration)).isdisjoint(texts_in(evaluation))


def test_two_files(tmp_path: Path) -> None:
    other = write_rows(tmp_path / "other.csv", [{"text": f"w5 {word}", "label": "red"} for word in WORDS[:10]])
    _, calibration, evaluation = load(experiment(calibration=other, calibration_samples=4))
    assert len(evaluation) == ROWS
    assert len(calibration) == 4
    assert all(text[:2] == (CLS, 5) and len(text) == 4 for text in texts_in(calibration))


def test_the_same_data_for_both() -> None:
    _, calibration, evaluation = load(experiment(same_data=True))
    assert len(calibration) == 8
    assert evaluation is None


# --- images ---


def test_an_archive_of_images() -> None:
    m = material()
    model = ZOO["vit"].build()
    examples = load_examples(model, m.pictures_npz, processor=m.vit)
    pictures = numpy.load(m.pictures_npz)["x"]
    assert len(examples) == 12
    expected = (torch.tensor(pictures[3]).permute(2, 0, 1) / 255 - 0.5) / 0.5
    torch.testing.assert_close(examples.rows[3]["pixel_values"], expected)
    assert [int(row["labels"]) for row in examples.rows] == [n % LABELS for n in range(12)]


def test_a_folder_of_images_is_the_same() -> None:
    m = material()
    model = ZOO["vit"].build()
    archive, folder = (
        load_examples(model, place, processor=m.vit).rows for place in (m.pictures_npz, m.pictures_folder)
    )
    order = sorted(range(12), key=lambda number: (number % LABELS, number))  # by label, then by name
    for row, number in zip(folder, order, strict=True):
        assert torch.equal(row["pixel_values"], archive[number]["pixel_values"])
        assert int(row["labels"]) == number % LABELS


def test_images_are_prepared_as_the_processor_says(tmp_path: Path) -> None:
    settings = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7], "rescale_factor": 0.01}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    picture = numpy.full((1, 16, 16, 3), 50, dtype=numpy.uint8)
    numpy.savez(tmp_path / "one.npz", x=picture)
    (row,) = load_examples(ZOO["vit"].build(), tmp_path / "one.npz", processor=tmp_path).rows
    expected = [(0.5 - mean) / deviation for mean, deviation in zip(*list(settings.values())[:2], strict=True)]
    assert row["pixel_values"][:, 7, 7].tolist() == pytest.approx(expected)
    assert "labels" not in row


@pytest.mark.parametrize("shape", [(2, 16, 16), (2, 16, 16, 1), (2, 31, 23, 3)], ids=["grey", "one-channel", "large"])
def test_images_of_other_shapes_are_fitted(shape: tuple[int, ...], tmp_path: Path) -> None:
    numpy.savez(tmp_path / "x.npz", x_test=numpy.full(shape, 255, dtype=numpy.uint8), y_test=numpy.arange(2))
    rows = load_examples(ZOO["vit"].build(), tmp_path / "x.npz", processor=tmp_path, split="test").rows
    assert [tuple(row["pixel_values"].shape) for row in rows] == [(3, 16, 16)] * 2
    assert rows[0]["pixel_values"].mean() == pytest.approx(1.0)
    with pytest.raises(DataError, match=r"has no array x_train; it has x_test, y_test"):
        load_examples(ZOO["vit"].build(), tmp_path / "x.npz", processor=tmp_path, split="train")


def test_a_pickle_in_an_archive_is_not_opened(tmp_path: Path) -> None:
    numpy.savez(tmp_path / "x.npz", x=numpy.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError, match="pickle"):
        load_examples(ZOO["vit"].build(), tmp_path / "x.npz", processor=tmp_path)


def test_labels_that_are_no_classes_are_refused(model: Any, tmp_path: Path) -> None:
    for number, label in enumerate((0.5, math.inf)):
        data = write_rows(tmp_path / f"{number}.csv", [{"text": "w5", "label": 0}, {"text": "w6", "label": label}])
        with pytest.raises(DataError, match="row 1"):
            load_examples(model, data, processor=material().bert)
