"""The texts in data, and their tokens, for shrinking a vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headprune.data.batching import Examples
from headprune.data.columns import ENDING, Columns, find_columns
from headprune.data.files import read_text, suffix_of
from headprune.data.tables import as_list, missing, read_table
from headprune.errors import DataError
from headprune.tasks import Task

TOKENS_AS_LABELS = ("masked-lm", "seq2seq-lm")


def texts_of(source: str | Path, *, columns: Columns, task: Task, split: str | None = None) -> list[str]:
    """All texts of a file or a data set: a text file as a whole and by lines, or the columns of a table that the task
    reads. A requested column that is not in this table is looked up by its usual names."""
    path = Path(source)
    if suffix_of(path) == ".txt":
        whole = read_text(path)
        texts = [whole, *whole.splitlines()]
    else:
        table = read_table(source, split)
        requested = {field.name: getattr(columns, field.name) for field in dataclasses.fields(columns)}
        available = Columns(**{name: column if column in table else None for name, column in requested.items()})
        used = find_columns(table, available, task.name)
        names = [used.text, used.pair, used.context, used.choices]
        names += [used.label] if task.name == "seq2seq-lm" else []
        names += [name for name in (*table, "sent2") if name in table and (ENDING.fullmatch(name) or name == "sent2")]
        texts = [text for name in dict.fromkeys(names) if name for value in table[name] for text in _texts(value)]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise DataError(f"{source} has no text; give a file with some.")
    return texts


def _texts(value: Any) -> Iterator[str]:
    """The texts in a cell; the words of a list also joined."""
    entries = as_list(value)
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif entries is not None:
        for entry in entries:
            yield from _texts(entry)
        yield "".join(f" {entry}" for entry in entries if isinstance(entry, str))
    elif not missing(value):
        yield str(value)


def tokens_in(examples: Examples, task: Task) -> set[int]:
    """The tokens in the inputs and the targets of the model."""
    ids: set[int] = set()
    for row in examples.rows:
        for tokens in _tokens(row, task):
            ids.update(tokens.flatten().tolist())
    return {token for token in ids if token >= 0}


def refuse_changed_tokens(source: str, before: Examples, after: Examples, task: Task, old_ids: Sequence[int]) -> None:
    """Raise for data that the tokenizer with the smaller vocabulary splits into other tokens."""
    to_old = torch.tensor(old_ids)
    for number, (row_before, row_after) in enumerate(zip(before.rows, after.rows, strict=True)):
        for tokens_before, tokens_after in zip(_tokens(row_before, task), _tokens(row_after, task), strict=True):
            if tokens_before.shape != tokens_after.shape or not torch.equal(
                tokens_before, torch.where(tokens_after < 0, tokens_after, to_old[tokens_after.clamp(min=0)])
            ):
                raise DataError(
                    f"Row {number} of {source} is split into other tokens with the smaller vocabulary; leave "
                    "--vocabulary out, or add a text that contains the whole row."
                )


def _tokens(row: Mapping[str, torch.Tensor], task: Task) -> list[torch.Tensor]:
    return [row["input_ids"], *([row["labels"]] if task.name in TOKENS_AS_LABELS and "labels" in row else [])]
