"""Rows of model inputs from texts, for every task."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from transformers import PreTrainedModel

from headprune.data import labels, qa_tags_choices
from headprune.data.batching import Examples
from headprune.data.columns import Columns, find_columns, texts_in
from headprune.data.lazy_rows import Row, Rows
from headprune.data.tables import Table, as_list, missing
from headprune.data.tokenizers import Encoder
from headprune.errors import DataError
from headprune.tasks import IGNORED, Task

log = logging.getLogger(__name__)
MASK_PROBABILITY = 0.15  # of the tokens, as in BERT's training
LANGUAGE_MODELS = ("causal-lm", "masked-lm", "image-text-to-text")
LINE_PER_ROW = ("sequence-classification", "features")  # tasks for which every line of plain text is a row


@dataclass(frozen=True)
class Source:
    """A table with everything that is needed to make rows of it."""

    config: Any
    task: Task
    table: Table
    columns: Columns
    encoder: Encoder
    seed: int

    @property
    def text(self) -> str:
        return self.columns.text or ""


def from_table(
    model: PreTrainedModel,
    task: Task,
    table: Table,
    columns: Columns,
    processor: Any,
    max_length: int,
    seed: int,
) -> Examples:
    kind = "regression" if _problem(task) == "regression" else task.name
    encoder = Encoder(model, task, processor, max_length)
    source = Source(model.config, task, table, find_columns(table, columns, kind), encoder, seed)
    return Examples(MAKERS[task.name](source), encoder.padding)


def from_plain_text(
    model: PreTrainedModel, task: Task, text: str, processor: Any, max_length: int, seed: int
) -> Examples:
    """For language models, the text split into blocks of `max_length` tokens; for tasks that text without labels is
    enough for, one row per line that is not blank."""
    if task.name in LINE_PER_ROW:
        table = Table({"text": [line for line in text.splitlines() if line.strip()]}, typed=True)
        return from_table(model, task, table, Columns(), processor, max_length, seed)
    if task.name not in LANGUAGE_MODELS:
        raise DataError(
            f"A model of the task {task.name!r} needs more than plain text; give a table with the columns that the "
            "task has."
        )
    encoder = Encoder(model, task, processor, max_length)
    encoder.refuse_unknown([text])
    ids = torch.tensor(encoder.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
    # The last block may be shorter, but a block of one token has no target.
    blocks = [part for part in ids.split(encoder.limit) if len(part) > 1]
    encoder.check([[int(part.max())] for part in blocks], range(len(blocks)))
    mask_row = _masker(encoder, seed) if task.name == "masked-lm" else None

    def make(numbers: Sequence[int]) -> list[Row]:
        rows: list[Row] = []
        for number in numbers:
            row = {"input_ids": blocks[number], "attention_mask": torch.ones_like(blocks[number])}
            rows.append(row if mask_row is None else mask_row(row, number))
        return rows

    return Examples(Rows(make, range(len(blocks))), encoder.padding)


# --- rows of a table, one function per task ---


def _classification_rows(source: Source) -> Rows:
    """A text or a pair, with one label, several, or regression targets."""
    table, encoder = source.table, source.encoder
    texts = _texts(source)
    pairs = texts_in(table, source.columns.pair, blank=True) if source.columns.pair else None
    targets = _targets(source)

    def make(numbers: Sequence[int]) -> list[Row]:
        second_texts = [pairs[number] for number in numbers] if pairs is not None else None
        rows = encoder.rows(encoder([texts[number] for number in numbers], second_texts, rows=numbers))
        if targets is not None:
            for row, number in zip(rows, numbers, strict=True):
                row["labels"] = targets[number]
        return list(rows)

    return Rows(make, range(len(texts)))


def _targets(source: Source) -> list[torch.Tensor] | None:
    problem, table, config = _problem(source.task), source.table, source.config
    column = source.columns.label
    if column is None:
        names = sorted(labels.ids_by_name(config), key=labels.ids_by_name(config).__getitem__)
        if problem == "multi_label_classification" and all(name in table for name in names):
            flags = zip(*(labels.regression_targets(_OneLabel, table[name], name) for name in names), strict=True)
            return [torch.stack(row) for row in flags]
        return None
    values = labels.labels_in(config, table, column)
    if problem == "regression":
        return labels.regression_targets(config, values, column)
    # Where the config has no problem_type, it follows from the first labels, as in transformers.
    problem_type = getattr(config, "problem_type", None) or getattr(source.task, "_problem", None)
    if problem == "multi_label_classification" or (problem_type is None and as_list(values[0]) is not None):
        return labels.multi_hot_targets(config, values, column, typed=table.typed)
    return [torch.tensor(number) for number in labels.class_ids(config, values, column, typed=table.typed)]


class _OneLabel:
    """A config with one label, to read a column of flags as numbers."""

    num_labels = 1


def _causal_lm_rows(source: Source) -> Rows:
    """Text in which each token predicts the next."""
    texts, encoder = [_or_blank(value) for value in source.table[source.text]], source.encoder
    encoder.refuse_unknown([text for text in texts if text])
    counts = encoder.counts(texts)
    selected = [number for number, count in enumerate(counts) if count > 1 and texts[number]]
    _warn_left_out(len(texts) - len(selected), len(texts))

    def make(numbers: Sequence[int]) -> list[Row]:
        return list(encoder.rows(encoder([texts[number] for number in numbers], rows=numbers)))

    return Rows(make, selected)


def _masked_lm_rows(source: Source) -> Rows:
    """Text with some tokens masked."""
    texts, encoder = [_or_blank(value) for value in source.table[source.text]], source.encoder
    encoder.refuse_unknown([text for text in texts if text])
    mask_row = _masker(encoder, source.seed)
    selected = [number for number, text in enumerate(texts) if text]
    _warn_left_out(len(texts) - len(selected), len(texts))

    def make(numbers: Sequence[int]) -> list[Row]:
        rows = encoder.rows(encoder([texts[number] for number in numbers], rows=numbers))
        return [mask_row(row, number) for row, number in zip(rows, numbers, strict=True)]

    return Rows(make, selected)


def _seq2seq_rows(source: Source) -> Rows:
    """A text and its target text."""
    if source.columns.label is None:
        raise DataError(
            "An encoder-decoder model needs a text to predict for each text; name its column with --label-column: "
            f"{', '.join(map(repr, source.table))}."
        )
    texts, encoder = _texts(source), source.encoder
    targets = texts_in(source.table, source.columns.label)

    def make(numbers: Sequence[int]) -> list[Row]:
        rows = encoder.rows(encoder([texts[number] for number in numbers], rows=numbers))
        target_texts = [targets[number] for number in numbers]
        encoded = encoder.tokenizer(text_target=target_texts, truncation=True, max_length=encoder.limit)["input_ids"]
        encoder.check(encoded, numbers)
        for row, ids in zip(rows, encoded, strict=True):
            row["labels"] = torch.tensor(ids)
        return list(rows)

    return Rows(make, range(len(texts)))


def _text_rows(source: Source) -> Rows:
    """Text without labels, for models without a head."""
    texts, encoder = _texts(source), source.encoder
    pairs = texts_in(source.table, source.columns.pair, blank=True) if source.columns.pair else None

    def make(numbers: Sequence[int]) -> list[Row]:
        second_texts = [pairs[number] for number in numbers] if pairs is not None else None
        return list(encoder.rows(encoder([texts[number] for number in numbers], second_texts, rows=numbers)))

    return Rows(make, range(len(texts)))


MAKERS: dict[str, Callable[[Source], Rows]] = {
    "sequence-classification": _classification_rows,
    "token-classification": qa_tags_choices.tag_rows,
    "question-answering": qa_tags_choices.answer_rows,
    "multiple-choice": qa_tags_choices.choice_rows,
    "masked-lm": _masked_lm_rows,
    "causal-lm": _causal_lm_rows,
    "image-text-to-text": _causal_lm_rows,
    "seq2seq-lm": _seq2seq_rows,
    "features": _text_rows,
}


# --- helpers ---


def _problem(task: Task) -> str | None:
    return getattr(task, "problem", None)


def _texts(source: Source) -> list[str]:
    """The texts; raises for one without tokens, which blanks may give where no special tokens are added."""
    texts, encoder = texts_in(source.table, source.text), source.encoder
    encoder.refuse_unknown(texts)
    if encoder.tokenizer.num_special_tokens_to_add() == 0:
        for row, count in enumerate(encoder.counts(texts)):
            encoder.check([range(min(count, 1))], [row])
    return texts


def _or_blank(value: Any) -> str:
    return "" if missing(value) else str(value)


def _warn_left_out(count: int, total: int) -> None:
    if count:
        log.warning(
            "%d of %d texts have fewer than two tokens, so there is nothing to predict; they are left out.",
            count,
            total,
        )


def _masker(encoder: Encoder, seed: int) -> Callable[[Row, int], Row]:
    """A function that masks a share of a row's tokens and makes them the labels, seeded by the row's number, so that it
    does not depend on other rows."""
    mask_id = encoder.tokenizer.mask_token_id
    if mask_id is None:
        raise DataError("The tokenizer has no mask token, so it cannot make data for a masked language model.")
    special = torch.tensor(encoder.tokenizer.all_special_ids)

    def mask_row(row: Row, number: int) -> Row:
        ids = row["input_ids"]
        state = numpy.random.SeedSequence([seed % 2**63, number]).generate_state(1, numpy.uint64)
        generator = torch.Generator().manual_seed(int(state[0]))
        ordinary = ~torch.isin(ids, special)
        scores = torch.rand(len(ids), generator=generator).masked_fill(~ordinary, 2.0)
        masked = scores < MASK_PROBABILITY
        if not masked.any() and ordinary.any():
            masked[scores.argmin()] = True
        return {**row, "labels": ids.masked_fill(~masked, IGNORED), "input_ids": ids.masked_fill(masked, mask_id)}

    return mask_row
