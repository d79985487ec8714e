"""Finds the columns of a table that a task needs, by the names that are common in data sets."""

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
    """The names of the columns; None means: find it by its usual name.

    `text` is a question, a list of words or a source text where the task has one; `label` holds answers, tags or target
    texts. `context` is the text that contains the answer, `choices` a list of possible answers.
    """

    text: str | None = None
    pair: str | None = None
    label: str | None = None
    context: str | None = None
    choices: str | None = None


@dataclass(frozen=True)
class UsualNames:
    """Common names of each column in order of priority."""

    text: tuple[str, ...] = TEXT
    label: tuple[str, ...] = LABEL
    context: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


NAMES = {
    "sequence-classification": UsualNames(),
    "regression": UsualNames(label=(*LABEL, "score")),
    "token-classification": UsualNames(
        ("tokens", "words", *TEXT), ("tags", "ner_tags", "labels", "label", "pos_tags", "chunk_tags")
    ),
    "question-answering": UsualNames(
        ("question", "query"), ("answers", "answer", "answer_text"), context=("context", "passage", "paragraph", "text")
    ),
    "multiple-choice": UsualNames(
        ("text", "sent1", "startphrase", "premise", "question", "context"),
        (*LABEL, "answer", "answerKey"),
        choices=("choices", "endings", "options"),
    ),
    "seq2seq-lm": UsualNames(
        (*TEXT, "document", "article", "source", "input"),
        (*LABEL, "targets", "summary", "highlights", "translation", "output"),
    ),
}


def find_columns(table: Mapping[str, Sequence[Any]], requested: Columns, kind: str) -> Columns:
    """The requested columns, checked, and the ones with usual names for those that are None."""
    for field in dataclasses.fields(requested):
        name = getattr(requested, field.name)
        if name is not None and name not in table:
            raise DataError(f"There is no {field.name} column {name!r}; the data has {', '.join(map(repr, table))}.")
    usual = NAMES.get(kind, UsualNames())

    def find(field: str, excluded: Sequence[str | None] = ()) -> str | None:
        names = (name for name in getattr(usual, field) if name in table and name not in excluded)
        return getattr(requested, field) or next(names, None)

    text = find("text", [requested.pair, requested.label, requested.context, requested.choices])
    if text is None:
        raise DataError(f"No text column was found; name it with --text-column: {', '.join(map(repr, table))}.")
    excluded = [text, requested.pair]
    return Columns(text, requested.pair, find("label", excluded), find("context", excluded), find("choices", excluded))


def texts_in(table: Table, column: str, *, blank: bool = False) -> list[str]:
    """A column of texts; raises for a row without text, unless `blank` allows empty strings."""
    values = table[column]
    for row, value in enumerate(values):
        if missing(value) and not (blank and isinstance(value, str)):
            raise DataError(
                f"Row {row} of column {column!r} has no text (rows are counted from 0); fill it in or remove the row."
            )
    return [str(value) for value in values]
