"""Tasks whose rows hold more than a text and a label: tags for words, answers in a context, one choice of several."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headprune.data import labels
from headprune.data.columns import ENDING, texts_in
from headprune.data.encoder import INPUTS
from headprune.data.lazy import Row, Rows
from headprune.data.tables import as_list, missing
from headprune.errors import DataError
from headprune.tasks import IGNORED

if TYPE_CHECKING:
    from headprune.data.texts import Source

log = logging.getLogger(__name__)


# --- tags ---


def tagged(source: Source) -> Rows:
    """A list of words and a tag for each; the first token of a word has its tag, the others have none that counts."""
    _refuse_slow(source, "Tags can be given to")
    words = _lists(source.table[source.text], source.text)
    column, encoder = source.columns.label, source.encoder
    encoder.refuse_unknown([" ".join(row) for row in words])
    tags: list[list[int]] | None = None
    if column is not None:
        named = _lists(labels.labels_in(source.config, source.table, column), column, strings=False)
        for row, (one, other) in enumerate(zip(words, named, strict=True)):
            if len(one) != len(other):
                raise DataError(
                    f"Row {row} has {len(one)} words and {len(other)} tags in {column!r}; give one for each."
                )
        flat, rows = labels.flattened(named)
        found = labels.classes(source.config, flat, column, typed=source.table.typed, rows=rows, ignored=True)
        tags = labels.regrouped(found, named)
    # Byte-level tokenizers tell a word within a text by the blank before it.
    spaced = "ByteLevel" in json.dumps(_pre_tokenizer(encoder.tokenizer))

    def make(numbers: Sequence[int]) -> list[Row]:
        texts = [[f" {word}" if spaced else word for word in words[number]] for number in numbers]
        encoded = encoder(texts, rows=numbers, is_split_into_words=True)
        rows = encoder.rows(encoded)
        for place, number in enumerate(numbers):
            if tags is not None:
                rows[place]["labels"] = _spread(encoded.word_ids(place), tags[number])
        return list(rows)

    return Rows(make, range(len(words)))


def _spread(words: Sequence[int | None], tags: Sequence[int]) -> torch.Tensor:
    before = [None, *words[:-1]]
    return torch.tensor(
        [IGNORED if word is None or word == last else tags[word] for word, last in zip(words, before, strict=True)]
    )


def _lists(values: Sequence[Any], column: str, *, strings: bool = True) -> list[list[Any]]:
    """A list per row: as such, as JSON, or as words with blanks between them."""
    result = []
    for row, value in enumerate(values):
        entries = as_list(value)
        if entries is None and not missing(value):
            entries = str(value).split()
        if not entries or any(missing(entry) for entry in entries):
            raise DataError(
                f"Row {row} of column {column!r} has no list without gaps (rows are counted from 0); mend or remove it."
            )
        result.append([str(entry) for entry in entries] if strings else entries)
    return result


def _pre_tokenizer(tokenizer: Any) -> Any:
    return json.loads(tokenizer.backend_tokenizer.to_str()).get("pre_tokenizer")


def _refuse_slow(source: Source, what: str) -> None:
    if not source.encoder.tokenizer.is_fast:
        raise DataError(
            f"{what} tokens only where a tokenizer says which characters they come from, and "
            f"{type(source.encoder.tokenizer).__name__} does not; save a fast one and name it with --processor."
        )


# --- answers ---


def answered(source: Source) -> Rows:
    """A question, a context, and where in it the answer is: the positions of its first and last token.

    Only the context is cut. A question without an answer, or with one that was cut off, has position 0 for both.
    """
    _refuse_slow(source, "Answers can be found among")
    columns, table, encoder = source.columns, source.table, source.encoder
    if columns.context is None:
        raise DataError(f"Questions need a context column; the data has {', '.join(map(repr, table))}.")
    questions, contexts = texts_in(table, source.text), texts_in(table, columns.context)
    encoder.refuse_unknown(contexts)
    spans = None
    cut_off: list[int] = []
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
            except Exception:  # of the tokenizers library, which has no type of its own for it
                raise DataError(
                    f"The question in row {number} leaves no room for its context within {encoder.limit} tokens; raise "
                    "--max-length."
                ) from None
            (row,) = encoder.rows(encoded)
            if spans is not None:
                first, last = _positions(encoded, spans[number])
                if last == 0 and spans[number] is not None:
                    cut_off.append(number)
                    if len(cut_off) == 1:
                        log.warning(
                            "Some answers are cut off and count as none (row %d is the first); raise --max-length.",
                            number,
                        )
                row.update(start_positions=torch.tensor(first), end_positions=torch.tensor(last))
            rows.append(row)
        return rows

    return Rows(make, range(len(questions)))


def _span(answer: Any, start: Any, context: str, row: int) -> tuple[int, int] | None:
    """First character of the answer and the one after its last; None where there is no answer."""
    text, begin = _first_answer(answer, start)
    if missing(text):
        return None
    text = str(text)
    if missing(begin):
        begin = context.find(text)
    begin = int(begin)
    if begin < 0 or context[begin : begin + len(text)] != text:
        where = f" at character {begin}" if begin >= 0 else ""
        raise DataError(
            f"The answer {text!r} of row {row} is not in its context{where}; correct it, or leave it empty for a "
            "question without one."
        )
    return begin, begin + len(text)


def _first_answer(answer: Any, start: Any) -> tuple[Any, Any]:
    """Text and first character of the first answer, in the forms that data sets have."""
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
        place
        for place, ((begin, end), part) in enumerate(zip(offsets, parts, strict=True))
        if part == 1 and begin < span[1] and end > span[0]
    ]
    whole = bool(inside) and offsets[inside[-1]][1] >= span[1]
    return (inside[0], inside[-1]) if whole else (0, 0)


# --- choices ---


def chosen(source: Source) -> Rows:
    """A text with each of its possible continuations or answers, as rows of one tensor, and the right one's number."""
    encoder, table = source.encoder, source.table
    texts = texts_in(table, source.text)
    choices, keys = _choices(source)
    count = len(choices[0])
    for row, own in enumerate(choices):
        if len(own) != count or count < 2 or any(missing(choice) for choice in own):
            raise DataError(
                f"Row {row} has {len(own)} choices where row 0 has {count}; all rows need as many, none empty."
            )
    encoder.refuse_unknown([str(choice) for own in choices[:100] for choice in own])
    column = source.columns.label
    right = None
    if column is not None:
        right = [_right(value, keys[row], count, column, row) for row, value in enumerate(table[column])]

    def make(numbers: Sequence[int]) -> list[Row]:
        rows: list[Row] = []
        for number in numbers:
            own = [str(choice) for choice in choices[number]]
            encoded = encoder([texts[number]] * count, own, rows=[number] * count)
            width = max(len(ids) for ids in encoded["input_ids"])
            row = {}
            for name in (name for name in INPUTS if name in encoded):
                fill = encoder.padding.get(name, 0)
                row[name] = torch.tensor([ids + [fill] * (width - len(ids)) for ids in encoded[name]], dtype=torch.long)
            if right is not None:
                row["labels"] = torch.tensor(right[number])
            rows.append(row)
        return rows

    return Rows(make, range(len(texts)))


def _choices(source: Source) -> tuple[list[list[Any]], list[list[str] | None]]:
    """The choices of every row, and the letters they are called by where they are."""
    table, column = source.table, source.columns.choices
    if column is not None:
        found: list[list[Any]] = []
        keys: list[list[str] | None] = []
        for row, value in enumerate(table[column]):
            if isinstance(value, str) and value.lstrip().startswith("{"):
                value = json.loads(value)
            letters = value.get("label") if isinstance(value, Mapping) else None
            own = as_list(value.get("text") if isinstance(value, Mapping) else value)
            if own is None:
                raise DataError(f"Row {row} of column {column!r} has no list of choices; write one, as JSON in a csv.")
            found.append(own)
            keys.append([str(letter) for letter in letters] if letters is not None else None)
        return found, keys
    names = sorted((name for name in table if ENDING.fullmatch(name)), key=lambda name: (len(name), name))
    if len(names) < 2:
        raise DataError(
            "No choices were found; give a column 'choices' with lists, or columns ending0, ending1 and so on, next to "
            f"{', '.join(map(repr, table))}."
        )
    begins = table["sent2"] if "sent2" in table and source.text != "sent2" else None  # SWAG: what the endings end
    rows = [[table[name][row] for name in names] for row in range(table.rows)]
    if begins is not None:
        rows = [[f"{begins[row]} {end}" for end in own] for row, own in enumerate(rows)]
    return rows, [None] * len(rows)


def _right(value: Any, keys: list[str] | None, count: int, column: str, row: int) -> int:
    """The place of the right choice, from its number or its letter."""
    if missing(value):
        raise DataError(f"Row {row} of column {column!r} has no label; fill it in or remove the row.")
    if keys is not None and str(value) in keys:
        return keys.index(str(value))
    text = str(value).strip()
    place = "ABCDEFGHIJ".find(text.upper()) if len(text) == 1 and text.isalpha() else labels.whole(value)
    if place is None or not 0 <= place < count:
        raise DataError(
            f"Label {value!r} in row {row} of column {column!r} is none of its {count} choices, 0 to {count - 1}."
        )
    return place
