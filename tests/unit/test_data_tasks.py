"""Tables for every task: tags for words, answers in a context, choices, target texts, models without a head."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from headprune.data import Columns, load_examples
from headprune.data.columns import NAMES, TEXT
from headprune.data.texts import MAKERS
from headprune.errors import DataError
from headprune.tasks import TASKS, task_of
from headprune.tasks.classification import AudioClassification
from oracles import IGNORED
from run_helpers import SPECIAL, bert, classifier, material, write_rows
from zoo import VOCAB, ZOO

CLS, PAD, SEP, UNK = range(4)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def pieces() -> Any:
    """Two letters per token, at most: words of more have several tokens. Offsets are those of the text."""
    vocabulary = [*SPECIAL, *LETTERS, *"0123456789.", "ab", "cd", "ef", "gh"]
    inner = Tokenizer(models.WordPiece({w: n for n, w in enumerate(vocabulary)}, unk_token="[UNK]"))
    inner.model.continuing_subword_prefix = ""
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit()])
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    names = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
    assert len(vocabulary) <= VOCAB
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, model_input_names=inputs, **dict(zip(names, SPECIAL, strict=True))
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pieces")
    pieces().save_pretrained(folder)
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Lists as such in json and parquet, as JSON in csv."""
    if path.suffix in (".csv", ".tsv"):
        rows = [{k: v if isinstance(v, (str, int)) else json.dumps(v) for k, v in row.items()} for row in rows]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path
    return Path(write_rows(path, rows))


# --- tags ---

TAG_NAMES = {"O": 0, "PER": 1, "LOC": 2}
WORDS = [["abcd", "e", "ghgh"], ["x"], ["ab", "cdef"]]
TAGS = [["PER", "O", "LOC"], ["O"], ["LOC", "PER"]]


def tagger(**settings: Any) -> Any:
    names = {"label2id": TAG_NAMES, "id2label": {n: name for name, n in TAG_NAMES.items()}}
    return bert(transformers.BertForTokenClassification, **{**names, **settings})


def slowly_tagged(words: list[str], tags: list[int]) -> tuple[list[int], list[int]]:
    """Each word alone: its first token has the tag."""
    tokens, ids, labels = pieces(), [CLS], [IGNORED]
    for word, tag in zip(words, tags, strict=True):
        own = tokens(word, add_special_tokens=False)["input_ids"]
        ids += own
        labels += [tag] + [IGNORED] * (len(own) - 1)
    return [*ids, SEP], [*labels, IGNORED]


@pytest.mark.parametrize("named", [True, False], ids=["names", "numbers"])
@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "csv", "tsv"])
def test_tags(suffix: str, named: bool, place: Path, tmp_path: Path) -> None:
    tags: list[list[Any]] = TAGS if named else [[TAG_NAMES[tag] for tag in row] for row in TAGS]
    rows = [{"tokens": w, "ner_tags": t} for w, t in zip(WORDS, tags, strict=True)]
    examples = load_examples(tagger(), write(tmp_path / f"x.{suffix}", rows), processor=place)
    for row, words, own in zip(examples.rows, WORDS, TAGS, strict=True):
        ids, labels = slowly_tagged(words, [TAG_NAMES[tag] for tag in own])
        assert row["input_ids"].tolist() == ids
        assert row["labels"].tolist() == labels
    assert examples.has_labels
    (batch,) = examples.batches(3)
    assert tagger()(**batch).loss.isfinite()


def test_words_and_tags_with_blanks_between(place: Path, tmp_path: Path) -> None:
    rows = [{"text": " ".join(w), "tags": " ".join(t)} for w, t in zip(WORDS, TAGS, strict=True)]
    actual = load_examples(tagger(), write(tmp_path / "x.csv", rows), processor=place).rows
    assert actual[0]["labels"].tolist() == slowly_tagged(WORDS[0], [1, 0, 2])[1]


def test_tags_that_do_not_count_and_cut_words(place: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "x.jsonl", [{"words": ["abcd", "e", "ghgh"], "labels": [1, -100, 2]}])
    (row,) = load_examples(tagger(), data, processor=place, max_length=5).rows
    ids, labels = slowly_tagged(["abcd", "e", "ghgh"], [1, IGNORED, 2])
    assert row["input_ids"].tolist() == [*ids[:4], SEP]
    assert row["labels"].tolist() == [*labels[:4], IGNORED]


def test_tags_for_a_tokenizer_that_marks_blanks(tmp_path: Path) -> None:
    """RoBERTa's: a word within a text begins with a blank, and so must the words of a list."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: n for n, word in enumerate(["[PAD]", *letters, "ab", "Ġab"])}
    inner = Tokenizer(models.BPE(words, [("a", "b"), ("Ġ", "ab")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]").save_pretrained(tmp_path)
    data = write(tmp_path / "x.jsonl", [{"tokens": ["ab", "ab", "x"], "tags": ["O", "PER", "LOC"]}])
    (row,) = load_examples(tagger(vocab_size=len(words)), data, processor=tmp_path).rows
    assert row["input_ids"].tolist() == [words["Ġab"], words["Ġab"], words["Ġ"], words["x"]]
    assert row["labels"].tolist() == [0, 1, 2, IGNORED]


def test_wrong_tags(place: Path, tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "Row 1 has 2 words and 1 tags": {"tokens": ["a", "b"], "tags": ["O"]},
        "Label 'ORG' in row 1": {"tokens": ["a"], "tags": ["ORG"]},
        "Row 1 of column 'tokens' has no complete list": {"tokens": ["a", None], "tags": ["O", "O"]},
        "Row 1 of column 'tags' has no complete list": {"tokens": ["a"], "tags": None},
    }
    for message, row in cases.items():
        data = write(tmp_path / "x.jsonl", [{"tokens": ["a"], "tags": ["O"]}, row])
        with pytest.raises(DataError, match=message):
            load_examples(tagger(), data, processor=place)


# --- answers ---

CONTEXT = "ab cdef x gh ab 12 zz"
QUESTION = "y z"


def reader() -> Any:
    return bert(transformers.BertForQuestionAnswering, num_labels=2)


def answered_as(row: Any) -> str:
    first, last = int(row["start_positions"]), int(row["end_positions"])
    return pieces().decode(row["input_ids"][first : last + 1]).replace(" ", "")


def answers(text: str, *, begin: int | None = None) -> dict[str, Any]:
    return {"text": [text], "answer_start": [CONTEXT.index(text) if begin is None else begin]}


SPANS: dict[str, Callable[[str], dict[str, Any]]] = {
    "squad": lambda text: {"answers": answers(text)},
    "list": lambda text: {"answers": [{"text": text, "answer_start": CONTEXT.index(text)}]},
    "columns": lambda text: {"answer_text": text, "answer_start": CONTEXT.index(text)},
    "text-alone": lambda text: {"answer": text},
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize("form", SPANS)
def test_answers(form: str, suffix: str, place: Path, tmp_path: Path) -> None:
    wanted = ["cdef", "x", "ghab12", "zz", "abcdef"]
    texts = ["cdef", "x", "gh ab 12", "zz", "ab cdef"]
    rows = [{"question": QUESTION, "context": CONTEXT, **SPANS[form](text)} for text in texts]
    examples = load_examples(reader(), write(tmp_path / f"x.{suffix}", rows), processor=place)
    assert [answered_as(row) for row in examples.rows] == wanted
    assert examples.has_labels
    (batch,) = examples.batches(8)
    assert reader()(**batch).loss.isfinite()
    task = task_of(reader())
    assert task.has_labels(batch)


def test_the_answer_where_it_begins_and_not_where_it_is_first(place: Path, tmp_path: Path) -> None:
    second = CONTEXT.rindex("ab")
    rows = [{"question": QUESTION, "context": CONTEXT, "answers": answers("ab", begin=b)} for b in (0, second)]
    actual = load_examples(reader(), write(tmp_path / "x.jsonl", rows), processor=place).rows
    assert int(actual[0]["start_positions"]) < int(actual[1]["start_positions"])
    assert [answered_as(row) for row in actual] == ["ab", "ab"]


def test_questions_without_an_answer(place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    empty: list[Any] = [{"text": [], "answer_start": []}, None, [], {"text": "", "answer_start": -1}]
    rows = [{"question": QUESTION, "context": CONTEXT, "answers": answer} for answer in [*empty, answers("zz")]]
    with caplog.at_level(logging.WARNING):
        actual = load_examples(reader(), write(tmp_path / "x.jsonl", rows), processor=place, max_length=10).rows
        places = [(int(row["start_positions"]), int(row["end_positions"])) for row in actual]
    assert places == [(0, 0)] * 5  # the last one was cut off
    assert caplog.text.count("row 4 is the first") == 1
    assert all(
        row["input_ids"].tolist()[:4] == actual[0]["input_ids"].tolist()[:4] for row in actual
    )  # never the question


def test_wrong_answers(place: Path, tmp_path: Path) -> None:
    good = {"question": QUESTION, "context": CONTEXT, "answers": answers("x")}
    cases: list[tuple[str, dict[str, Any]]] = [
        ("The answer 'x' of row 1 is not in its context at character 2", {**good, "answers": answers("x", begin=2)}),
        ("The answer 'q' of row 1 is not in its context;", {**good, "answers": {"text": ["q"]}}),
        ("Row 1 of column 'context' has no text", {**good, "context": None}),
    ]
    for message, row in cases:
        data = write(tmp_path / "x.jsonl", [good, row])
        with pytest.raises(DataError, match=message):
            load_examples(reader(), data, processor=place)
    data = write(tmp_path / "y.jsonl", [{**good, "question": "a " * 50}])
    with pytest.raises(DataError, match="row 0 leaves no room for its context within 10 tokens; raise --max-length"):
        load_examples(reader(), data, processor=place, max_length=10).batches(1)
    data = write(tmp_path / "z.jsonl", [{"question": QUESTION}])
    with pytest.raises(DataError, match="Questions need a context column"):
        load_examples(reader(), data, processor=place)


# --- choices ---

CHOICES = [["a b", "c", "d e f"], ["x y z ab", "cd", "x"]]
CHOSEN: dict[str, list[dict[str, Any]]] = {
    "list": [{"text": "gh", "choices": own, "label": n} for n, own in zip((2, 0), CHOICES, strict=True)],
    "columns": [
        {"sent1": "gh", **{f"ending{n}": c for n, c in enumerate(own)}, "label": right}
        for right, own in zip((2, 0), CHOICES, strict=True)
    ],
    "letters": [
        {"question": "gh", "choices": {"text": own, "label": ["A", "B", "C"]}, "answerKey": letter}
        for letter, own in zip("CA", CHOICES, strict=True)
    ],
    "plain-letters": [{"text": "gh", "options": own, "answer": a} for a, own in zip("CA", CHOICES, strict=True)],
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize("form", CHOSEN)
def test_choices(form: str, suffix: str, place: Path, tmp_path: Path) -> None:
    model = bert(transformers.BertForMultipleChoice)
    examples = load_examples(model, write(tmp_path / f"x.{suffix}", CHOSEN[form]), processor=place)
    tokens = pieces()
    for row, own in zip(examples.rows, CHOICES, strict=True):
        expected = tokens(["gh"] * 3, own, padding=True, return_tensors="pt")
        for name in ("input_ids", "attention_mask", "token_type_ids"):
            assert torch.equal(row[name], expected[name])
    (batch,) = examples.batches(2)
    assert batch["input_ids"].shape == (2, 3, max(row["input_ids"].shape[1] for row in examples.rows))
    assert batch["labels"].tolist() == [[2, 0][number] for number in examples.order()]
    with torch.no_grad():
        together = model(**batch).logits
        for number, logits in zip(examples.order(), together, strict=True):
            alone = {name: value[None] for name, value in examples.rows[number].items()}
            torch.testing.assert_close(model(**alone).logits[0], logits)


def test_endings_that_go_on(place: Path, tmp_path: Path) -> None:
    """SWAG: the endings end a second sentence that has begun."""
    data = write(tmp_path / "x.csv", [{"sent1": "gh", "sent2": "ab", "ending0": "x", "ending1": "y z", "label": 1}])
    (row,) = load_examples(bert(transformers.BertForMultipleChoice), data, processor=place).rows
    expected = pieces()(["gh", "gh"], ["ab x", "ab y z"], padding=True, return_tensors="pt")
    assert torch.equal(row["input_ids"], expected["input_ids"])


def test_wrong_choices(place: Path, tmp_path: Path) -> None:
    good = {"text": "gh", "choices": ["a", "b"], "label": 0}
    for message, row in [
        ("Row 1 has 3 choices and row 0 has 2", {**good, "choices": ["a", "b", "c"]}),
        ("Row 1 of column 'choices' has no list", {**good, "choices": "a"}),
        ("Label 2 in row 1 of column 'label' is none of its 2 choices", {**good, "label": 2}),
        ("Row 1 of column 'label' has no label", {**good, "label": None}),
    ]:
        data = write(tmp_path / "x.jsonl", [good, row])
        with pytest.raises(DataError, match=message):
            load_examples(bert(transformers.BertForMultipleChoice), data, processor=place)
    data = write(tmp_path / "y.jsonl", [{"text": "gh", "label": 0}])
    with pytest.raises(DataError, match="No choices were found; give a column 'choices'"):
        load_examples(bert(transformers.BertForMultipleChoice), data, processor=place)


# --- target texts, and no target at all ---


def test_target_texts(tmp_path: Path) -> None:
    m = material()
    data = write(tmp_path / "x.jsonl", [{"document": "w5 w6", "summary": "w9"}, {"document": "w7", "summary": "w8 w9"}])
    examples = load_examples(ZOO["t5"].build(), data, processor=m.bert)
    assert [row["labels"].tolist() for row in examples.rows] == [[CLS, 9, SEP], [CLS, 8, 9, SEP]]
    long = write(tmp_path / "y.jsonl", [{"text": "w5", "target": "w9 " * 100}])
    (row,) = load_examples(ZOO["bart"].build(), long, processor=m.bert).rows
    assert len(row["labels"]) == 38  # BART has 40 positions for its targets as well
    with pytest.raises(DataError, match="needs a text to predict for each text; name its column with --label-column"):
        load_examples(ZOO["t5"].build(), m.unlabelled_csv, processor=m.bert)


def test_a_model_without_a_head_takes_text_alone() -> None:
    m = material()
    examples = load_examples(bert(transformers.BertModel), m.data_csv, processor=m.bert)
    assert not examples.has_labels
    assert set(examples.rows[0]) == {"input_ids", "token_type_ids", "attention_mask"}


@pytest.mark.parametrize("name", ["clip", "whisper"])
def test_models_without_a_file_format_say_so(name: str) -> None:
    m = material()
    with pytest.raises(DataError, match="pass batches from Python"):
        load_examples(ZOO[name].build(), m.data_csv, processor=m.bert)
    with pytest.raises(DataError, match="pass batches from Python"):
        load_examples(classifier(), m.data_csv, processor=m.bert, task=AudioClassification(classifier()))


def test_the_task_can_be_given() -> None:
    """A model of three labels that is to say three numbers, or several of its labels."""
    m, model = material(), classifier()
    task = task_of(model, "multi_label_classification")
    rows = load_examples(model, m.data_csv, processor=m.bert, task=task).rows
    assert all(row["labels"].sum() == 1 and row["labels"].shape == (3,) for row in rows)
    assert len(TASKS) > 9
    with pytest.raises(DataError, match="must hold numbers"):
        load_examples(model, m.data_csv, processor=m.bert, task=task_of(model, "regression"))


def test_columns_that_are_named(place: Path, tmp_path: Path) -> None:
    rows = [{"q": QUESTION, "passage": "a", "about": CONTEXT, "a": answers("x")}]
    columns = Columns(text="q", context="about", label="a")
    (row,) = load_examples(reader(), write(tmp_path / "x.jsonl", rows), processor=place, columns=columns).rows
    assert answered_as(row) == "x"
    with pytest.raises(DataError, match="There is no context column 'abut'; the data has 'q', 'passage'"):
        load_examples(reader(), tmp_path / "x.jsonl", processor=place, columns=Columns(text="q", context="abut"))


# --- the documentation ---

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_the_documentation_names_every_task_and_its_columns() -> None:
    rows = {
        row[0]: row[1:] for row in re.findall(r"^\| `([a-z0-9-]+)` \|([^|]*)\|([^|]*)\|([^|]*)\|$", PAGE, re.MULTILINE)
    }
    assert set(rows) == {task.name for task in TASKS}
    for task, usual in NAMES.items():
        if task == "regression":
            continue
        text, label, more = (re.findall(r"`(\w+)`", cell) for cell in rows[task])
        assert set(usual.text) - set(TEXT) <= set(text)
        assert list(usual.label) == label
        assert {*usual.context, *usual.choices} <= set(more)
    for task in TASKS:
        if task.name not in MAKERS and task.name != "image-classification":
            assert "batches from Python" in rows[task.name][0]
