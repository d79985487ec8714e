"""The texts in data, as they stand there, and the tokens that a model sees of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from headprune.data.batches import Examples
from headprune.data.columns import ENDING, Columns, find_columns
from headprune.data.files import read_text, suffix_of
from headprune.data.tables import as_list, missing, read_table
from headprune.errors import DataError
from headprune.tasks import Task

TOKENS_AS_LABELS = ("masked-lm", "seq2seq-lm")


def texts_of(source: str | Path, *, columns: Columns, task: Task, split: str | None = None) -> list[str]:
    """All texts of a file or a data set: a text file as a whole and by its lines, of a table the columns that the task
    reads. Columns that were asked for and are not in this table are looked for by their usual names."""
    path = Path(source)
    if suffix_of(path) == ".txt":
        whole = read_text(path)
        texts = [whole, *whole.splitlines()]
    else:
        table = read_table(source, split)
        asked = {field.name: getattr(columns, field.name) for field in dataclasses.fields(columns)}
        there = Columns(**{name: column if column in table else None for name, column in asked.items()})
        found = find_columns(table, there, task.name)
        names = [found.text, found.pair, found.context, found.choices]
        names += [found.label] if task.name == "seq2seq-lm" else []
        names += [name for name in (*table, "sent2") if name in table and (ENDING.fullmatch(name) or name == "sent2")]
        texts = [text for name in dict.fromkeys(names) if name for value in table[name] for text in _texts(value)]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise DataError(f"{source} has no text; give a file with some.")
    return texts


def _texts(value: Any) -> Iterator[str]:
    """The texts in a cell; words in a list also stand beside each other."""
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
    """The tokens that the model sees, or has to say."""
    found: set[int] = set()
    for row in examples.rows:
        for tokens in _tokens(row, task):
            found.update(tokens.flatten().tolist())
    return {token for token in found if token >= 0}


def refuse_others(source: str, before: Examples, after: Examples, task: Task, kept: Sequence[int]) -> None:
    """Refuse data of which a smaller vocabulary makes something else."""
    old = torch.tensor(kept)
    for number, (one, other) in enumerate(zip(before.rows, after.rows, strict=True)):
        for was, now in zip(_tokens(one, task), _tokens(other, task), strict=True):
            if was.shape != now.shape or not torch.equal(was, torch.where(now < 0, now, old[now.clamp(min=0)])):
                raise DataError(
                    f"Row {number} of {source} is cut into other tokens with the smaller vocabulary; leave "
                    "--vocabulary out, or add a text with the whole row as it is given to the model."
                )


def _tokens(row: Mapping[str, torch.Tensor], task: Task) -> list[torch.Tensor]:
    return [row["input_ids"], *([row["labels"]] if task.name in TOKENS_AS_LABELS and "labels" in row else [])]
