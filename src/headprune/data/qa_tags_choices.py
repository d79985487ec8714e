"""Rows of tasks with more than a text and a label: tags of words, answers in a context, multiple choice."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headprune.data import labels
from headprune.data.columns import ENDING, texts_in
from headprune.data.lazy_rows import Row, Rows
from headprune.data.tables import as_list, missing
from headprune.data.tokenizers import INPUTS
from headprune.errors import DataError
from headprune.tasks import IGNORED

if TYPE_CHECKING:
    from headprune.data.texts import Source

log = logging.getLogger(__name__)


# --- tags ---


def tag_rows(source: Source) -> Rows:
    """Words with a tag each; the first token of a word has its tag, its other tokens are ignored."""
    _refuse_slow(source, "Token classification")
    words = _lists(source.table[source.text], source.text)
    column, encoder = source.columns.label, source.encoder
    encoder.refuse_unknown([" ".join(row) for row in words])
    tags: list[list[int]] | None = None
    if column is not None:
        tag_lists = _lists(labels.labels_in(source.config, source.table, column), column, strings=False)
        for row, (row_words, row_tags) in enumerate(zip(words, tag_lists, strict=True)):
            if len(row_words) != len(row_tags):
                raise DataError(
                    f"Row {row} has {len(row_words)} words and {len(row_tags)} tags in {column!r}; give one tag "
                    "per word."
                )
        flat, rows = labels.flatten(tag_lists)
        ids = labels.class_ids(source.config, flat, column, typed=source.table.typed, rows=rows, ignored=True)
        tags = labels.regroup(ids, tag_lists)
    # Byte-level tokenizers mark a word inside a text by the blank before it.
    with_blank = "ByteLevel" in json.dumps(_pre_tokenizer(encoder.tokenizer))

    def make(numbers: Sequence[int]) -> list[Row]:
        texts = [[f" {word}" if with_blank else word for word in words[number]] for number in numbers]
        encoded = encoder(texts, rows=numbers, is_split_into_words=True)
        rows = encoder.rows(encoded)
        for index, number in enumerate(numbers):
            if tags is not None:
                rows[index]["labels"] = _token_tags(encoded.word_ids(index), tags[number])
        return list(rows)

    return Rows(make, range(len(words)))


def _token_tags(words: Sequence[int | None], tags: Sequence[int]) -> torch.Tensor:
    previous = [None, *words[:-1]]
    return torch.tensor(
        [
            IGNORED if word is None or word == before else tags[word]
            for word, before in zip(words, previous, strict=True)
        ]
    )


def _lists(values: Sequence[Any], column: str, *, strings: bool = True) -> list[list[Any]]:
    """A list per row: from a list, JSON, or words separated by blanks."""
    result = []
    for row, value in enumerate(values):
        entries = as_list(value)
        if entries is None and not missing(value):
            entries = str(value).split()
        if not entries or any(missing(entry) for entry in entries):
            raise DataError(
                f"Row {row} of column {column!r} has no complete list (rows are counted from 0); correct or remove it."
            )
        result.append([str(entry) for entry in entries] if strings else entries)
    return result


def _pre_tokenizer(tokenizer: Any) -> Any:
    return json.loads(tokenizer.backend_tokenizer.to_str()).get("pre_tokenizer")


def _refuse_slow(source: Source, task: str) -> None:
    if not source.encoder.tokenizer.is_fast:
        raise DataError(
            f"{task} needs a fast tokenizer, which maps tokens to characters, and "
            f"{type(source.encoder.tokenizer).__name__} is slow; save a fast one and name it with --processor."
        )


# --- answers ---


def answer_rows(source: Source) -> Rows:
    """A question, a context, and the positions of the first and last token of the answer in it.

    Only the context is truncated. A question without an answer, or with a truncated one, has position 0 for both.
    """
    _refuse_slow(source, "Question answering")
    columns, table, encoder = source.columns, source.table, source.encoder
    if columns.context is None:
        raise DataError(f"Questions need a context column; the data has {', '.join(map(repr, table))}.")
    questions, contexts = texts_in(table, source.text), texts_in(table, columns.context)
    encoder.refuse_unknown(contexts)
    spans = None
    truncated: list[int] = []
    if columns.label is not None:
        starts = table.get("answer_start")
        spans = [
            _span(value, starts[row] if starts is not None else None, contexts[row], row)
            for row, value in enumerate(table[columns.label])
        ]

    def make(numbers: Sequence[int]) -> list[Row]:
        rows: list[Row] = []
        for number in numbers:
            try:
                encoded = encoder(
                    [questions[number]],
                    [contexts[number]],
                    rows=[number],
                    truncation="only_second",
                    return_offsets_mapping=True,
                )
            except DataError:
                raise
            except Exception:  # the tokenizers library raises a plain Exception
                raise DataError(
                    f"The question in row {number} leaves no room for its context within {encoder.limit} tokens; raise "
                    "--max-length."
                ) from None
            (row,) = encoder.rows(encoded)
            if spans is not None:
                first, last = _positions(encoded, spans[number])
                if last == 0 and spans[number] is not None:
                    truncated.append(number)
                    if len(truncated) == 1:
                        log.warning(
                            "Some answers are truncated and count as no answer (row %d is the first); raise "
                            "--max-length.",
                            number,
                        )
                row.update(start_positions=torch.tensor(first), end_positions=torch.tensor(last))
            rows.append(row)
        return rows

    return Rows(make, range(len(questions)))


def _span(answer: Any, start: Any, context: str, row: int) -> tuple[int, int] | None:
    """The first character of the answer and the one after its last; None where there is no answer."""
    text, begin = _first_answer(answer, start)
    if missing(text):
        return None
    text = str(text)
    if missing(begin):
        begin = context.find(text)
    try:
        begin = int(begin)
    except (TypeError, ValueError, OverflowError):
        raise DataError(
            f"The start of the answer in row {row} is {begin!r:.40}, not a whole number; correct it, or leave it out."
        ) from None
    if begin < 0 or context[begin : begin + len(text)] != text:
        where = f" at character {begin}" if begin >= 0 else ""
        raise DataError(
            f"The answer {text!r} of row {row} is not in its context{where}; correct it, or leave it empty for a "
            "question without one."
        )
    return begin, begin + len(text)


def _first_answer(answer: Any, start: Any) -> tuple[Any, Any]:
    """Text and first character of the first answer, from the formats of common data sets."""
    if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):  # an answer may begin with a bracket
            answer = json.loads(answer)
    if isinstance(answer, Mapping):  # {"text": [...], "answer_start": [...]}
        answer, start = answer.get("text"), answer.get("answer_start")
    answers, starts = as_list(answer), as_list(start)
    if answers is not None:
        first = answers[0] if answers else None
        if isinstance(first, Mapping):  # [{"text": ..., "answer_start": ...}]
            return _first_answer(first, None)
        answer = first
    return answer, (starts[0] if starts else None) if starts is not None else start


def _positions(encoded: Any, span: tuple[int, int] | None) -> tuple[int, int]:
    if span is None:
        return 0, 0
    offsets, parts = encoded["offset_mapping"][0], encoded.sequence_ids(0)
    inside = [
        index
        for index, ((begin, end), part) in enumerate(zip(offsets, parts, strict=True))
        if part == 1 and begin < span[1] and end > span[0]
    ]
    whole = bool(inside) and offsets[inside[-1]][1] >= span[1]
    return (inside[0], inside[-1]) if whole else (0, 0)


# --- choices ---


def choice_rows(source: Source) -> Rows:
    """A text with each of its choices, as rows of one tensor, and the index of the correct one."""
    encoder, table = source.encoder, source.table
    texts = texts_in(table, source.text)
    choices, keys = _choices(source)
    count = len(choices[0])
    for row, row_choices in enumerate(choices):
        if len(row_choices) != count or count < 2 or any(missing(choice) for choice in row_choices):
            raise DataError(
                f"Row {row} has {len(row_choices)} choices and row 0 has {count}; give all rows the same number "
                "(at least 2), none empty."
            )
    encoder.refuse_unknown([str(choice) for row_choices in choices[:100] for choice in row_choices])
    column = source.columns.label
    correct = None
    if column is not None:
        correct = [_correct_choice(value, keys[row], count, column, row) for row, value in enumerate(table[column])]

    def make(numbers: Sequence[int]) -> list[Row]:
        rows: list[Row] = []
        for number in numbers:
            row_choices = [str(choice) for choice in choices[number]]
            encoded = encoder([texts[number]] * count, row_choices, rows=[number] * count)
            width = max(len(ids) for ids in encoded["input_ids"])
            row = {}
            for name in (name for name in INPUTS if name in encoded):
                fill = encoder.padding.get(name, 0)
                row[name] = torch.tensor([ids + [fill] * (width - len(ids)) for ids in encoded[name]], dtype=torch.long)
            if correct is not None:
                row["labels"] = torch.tensor(correct[number])
            rows.append(row)
        return rows

    return Rows(make, range(len(texts)))


def _choices(source: Source) -> tuple[list[list[Any]], list[list[str] | None]]:
    """The choices of every row, and their keys (such as letters) where they have them."""
    table, column = source.table, source.columns.choices
    if column is not None:
        choices: list[list[Any]] = []
        keys: list[list[str] | None] = []
        for row, value in enumerate(table[column]):
            if isinstance(value, str) and value.lstrip().startswith("{"):
                value = json.loads(value)
            letters = value.get("label") if isinstance(value, Mapping) else None
            row_choices = as_list(value.get("text") if isinstance(value, Mapping) else value)
            if row_choices is None:
                raise DataError(f"Row {row} of column {column!r} has no list of choices; write one, as JSON in a csv.")
            choices.append(row_choices)
            keys.append([str(letter) for letter in letters] if letters is not None else None)
        return choices, keys
    names = sorted((name for name in table if ENDING.fullmatch(name)), key=lambda name: (len(name), name))
    if len(names) < 2:
        raise DataError(
            "No choices were found; give a column 'choices' with lists, or columns ending0, ending1 and so on, next to "
            f"{', '.join(map(repr, table))}."
        )
    beginnings = (
        table["sent2"] if "sent2" in table and source.text != "sent2" else None
    )  # SWAG: the beginning of the endings
    rows = [[table[name][row] for name in names] for row in range(table.rows)]
    if beginnings is not None:
        rows = [[f"{beginnings[row]} {end}" for end in row_choices] for row, row_choices in enumerate(rows)]
    return rows, [None] * len(rows)


def _correct_choice(value: Any, keys: list[str] | None, count: int, column: str, row: int) -> int:
    """The index of the correct choice, from its number or its letter."""
    if missing(value):
        raise DataError(f"Row {row} of column {column!r} has no label; fill it in or remove the row.")
    if keys is not None and str(value) in keys:
        return keys.index(str(value))
    text = str(value).strip()
    index = "ABCDEFGHIJ".find(text.upper()) if len(text) == 1 and text.isalpha() else labels.as_integer(value)
    if index is None or not 0 <= index < count:
        raise DataError(
            f"Label {value!r} in row {row} of column {column!r} is none of its {count} choices, 0 to {count - 1}."
        )
    return index
