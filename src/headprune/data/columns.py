"""Which columns of a table hold what a task needs, by the names that data sets give them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headprune.data.tables import Table, missing
from headprune.errors import DataError

TEXT = ("text", "sentence", "sentence1", "premise", "question")
LABEL = ("label", "labels", "target")
ENDING = re.compile(r"(ending|choice|option)_?\d+", re.IGNORECASE)  # SWAG's ending0 .. ending3 and the like


@dataclass(frozen=True)
class Columns:
    """Which columns hold what; None means: find it by its usual name.

    `text` is a question, a list of words or a source text where the task has one; `label` holds answers, tags or target
    texts. `context` is what a question is asked about, `choices` a list of possible answers.
    """

    text: str | None = None
    pair: str | None = None
    label: str | None = None
    context: str | None = None
    choices: str | None = None


@dataclass(frozen=True)
class Usual:
    """The names that are looked for, the first that is there counts."""

    text: tuple[str, ...] = TEXT
    label: tuple[str, ...] = LABEL
    context: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


NAMES = {
    "sequence-classification": Usual(),
    "regression": Usual(label=(*LABEL, "score")),
    "token-classification": Usual(
        ("tokens", "words", *TEXT), ("tags", "ner_tags", "labels", "label", "pos_tags", "chunk_tags")
    ),
    "question-answering": Usual(
        ("question", "query"), ("answers", "answer", "answer_text"), context=("context", "passage", "paragraph", "text")
    ),
    "multiple-choice": Usual(
        ("text", "sent1", "startphrase", "premise", "question", "context"),
        (*LABEL, "answer", "answerKey"),
        choices=("choices", "endings", "options"),
    ),
    "seq2seq-lm": Usual(
        (*TEXT, "document", "article", "source", "input"),
        (*LABEL, "targets", "summary", "highlights", "translation", "output"),
    ),
}


def find_columns(table: Mapping[str, Sequence[Any]], asked: Columns, kind: str) -> Columns:
    """The columns asked for, checked, and the usual ones for those that were not."""
    for field in dataclasses.fields(asked):
        name = getattr(asked, field.name)
        if name is not None and name not in table:
            raise DataError(f"There is no {field.name} column {name!r}; the data has {', '.join(map(repr, table))}.")
    usual = NAMES.get(kind, Usual())

    def found(field: str, taken: Sequence[str | None] = ()) -> str | None:
        names = (name for name in getattr(usual, field) if name in table and name not in taken)
        return getattr(asked, field) or next(names, None)

    text = found("text", [asked.pair, asked.label, asked.context, asked.choices])
    if text is None:
        raise DataError(f"No text column was found; name it with --text-column: {', '.join(map(repr, table))}.")
    taken = [text, asked.pair]
    return Columns(text, asked.pair, found("label", taken), found("context", taken), found("choices", taken))


def texts_in(table: Table, column: str, *, blank: bool = False) -> list[str]:
    """A column of texts; a row without one is refused, unless it may be blank."""
    values = table[column]
    for row, value in enumerate(values):
        if missing(value) and not (blank and isinstance(value, str)):
            raise DataError(
                f"Row {row} of column {column!r} has no text (rows are counted from 0); fill it in or remove the row."
            )
    return [str(value) for value in values]
