"""Text as models of every task take it, a row at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from transformers import PreTrainedModel

from headprune.data import labels, structured
from headprune.data.batches import Examples
from headprune.data.columns import Columns, find_columns, texts_in
from headprune.data.encoder import Encoder
from headprune.data.lazy import Row, Rows
from headprune.data.tables import Table, as_list, missing
from headprune.errors import DataError
from headprune.tasks import IGNORED, Task

log = logging.getLogger(__name__)
MASKED_SHARE = 0.15  # of the tokens, as BERT was trained
LANGUAGE_MODELS = ("causal-lm", "masked-lm", "image-text-to-text")


@dataclass(frozen=True)
class Source:
    """A table that is to become rows: what is needed to make any of them."""

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
    """One text cut into blocks of `max_length` tokens: for language models, which need no labels."""
    if task.name not in LANGUAGE_MODELS:
        raise DataError(
            f"Plain text is data for a language model, and {type(model).__name__} is none; give a table with a text "
            "column."
        )
    encoder = Encoder(model, task, processor, max_length)
    encoder.refuse_unknown([text])
    ids = torch.tensor(encoder.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.long)
    # A last block that is shorter than the others would be as good as any, but one token has nothing to predict.
    blocks = [part for part in ids.split(encoder.limit) if len(part) > 1]
    encoder.check([[int(part.max())] for part in blocks], range(len(blocks)))
    hide = _hider(encoder, seed) if task.name == "masked-lm" else None

    def make(numbers: Sequence[int]) -> list[Row]:
        rows: list[Row] = []
        for number in numbers:
            row = {"input_ids": blocks[number], "attention_mask": torch.ones_like(blocks[number])}
            rows.append(row if hide is None else hide(row, number))
        return rows

    return Examples(Rows(make, range(len(blocks))), encoder.padding)


# --- one maker per task: a table to rows ---


def _classified(source: Source) -> Rows:
    """A text or a pair, and one label, several, or numbers."""
    table, encoder = source.table, source.encoder
    texts = _texts(source)
    pairs = texts_in(table, source.columns.pair, blank=True) if source.columns.pair else None
    targets = _targets(source)

    def make(numbers: Sequence[int]) -> list[Row]:
        others = [pairs[number] for number in numbers] if pairs is not None else None
        rows = encoder.rows(encoder([texts[number] for number in numbers], others, rows=numbers))
        if targets is not None:
            for row, number in zip(rows, numbers, strict=True):
                row["labels"] = targets[number]
        return list(rows)

    return Rows(make, range(len(texts)))


def _targets(source: Source) -> list[torch.Tensor] | None:
    problem, table, config = _problem(source.task), source.table, source.config
    column = source.columns.label
    if column is None:
        names = sorted(labels.names_of(config), key=labels.names_of(config).__getitem__)
        if problem == "multi_label_classification" and all(name in table for name in names):
            flags = zip(*(labels.numbers(_One, table[name], name) for name in names), strict=True)
            return [torch.stack(row) for row in flags]
        return None
    values = labels.labels_in(config, table, column)
    if problem == "regression":
        return labels.numbers(config, values, column)
    # Where the config says nothing, transformers decides by the labels it sees first, and so do we.
    said = getattr(config, "problem_type", None) or getattr(source.task, "_problem", None)
    if problem == "multi_label_classification" or (said is None and as_list(values[0]) is not None):
        return labels.several_classes(config, values, column, typed=table.typed)
    return [torch.tensor(number) for number in labels.classes(config, values, column, typed=table.typed)]


class _One:
    """A column of flags per label is read as numbers, one per row."""

    num_labels = 1


def _continued(source: Source) -> Rows:
    """Text of which each token predicts the next."""
    texts, encoder = [_or_blank(value) for value in source.table[source.text]], source.encoder
    encoder.refuse_unknown([text for text in texts if text])
    counts = encoder.counts(texts)
    kept = [number for number, count in enumerate(counts) if count > 1 and texts[number]]
    _say_left_out(len(texts) - len(kept), len(texts))

    def make(numbers: Sequence[int]) -> list[Row]:
        return list(encoder.rows(encoder([texts[number] for number in numbers], rows=numbers)))

    return Rows(make, kept)


def _hidden(source: Source) -> Rows:
    """Text with some tokens hidden."""
    texts, encoder = [_or_blank(value) for value in source.table[source.text]], source.encoder
    encoder.refuse_unknown([text for text in texts if text])
    hide = _hider(encoder, source.seed)
    kept = [number for number, text in enumerate(texts) if text]
    _say_left_out(len(texts) - len(kept), len(texts))

    def make(numbers: Sequence[int]) -> list[Row]:
        rows = encoder.rows(encoder([texts[number] for number in numbers], rows=numbers))
        return [hide(row, number) for row, number in zip(rows, numbers, strict=True)]

    return Rows(make, kept)


def _translated(source: Source) -> Rows:
    """A text, and the text that should follow from it."""
    if source.columns.label is None:
        raise DataError(
            "An encoder-decoder model needs a text to predict for each text; name its column with --label-column: "
            f"{', '.join(map(repr, source.table))}."
        )
    texts, encoder = _texts(source), source.encoder
    targets = texts_in(source.table, source.columns.label)

    def make(numbers: Sequence[int]) -> list[Row]:
        rows = encoder.rows(encoder([texts[number] for number in numbers], rows=numbers))
        wanted = [targets[number] for number in numbers]
        encoded = encoder.tokenizer(text_target=wanted, truncation=True, max_length=encoder.limit)["input_ids"]
        encoder.check(encoded, numbers)
        for row, ids in zip(rows, encoded, strict=True):
            row["labels"] = torch.tensor(ids)
        return list(rows)

    return Rows(make, range(len(texts)))


def _described(source: Source) -> Rows:
    """Text alone, for models without a head; labels would be of no use."""
    texts, encoder = _texts(source), source.encoder
    pairs = texts_in(source.table, source.columns.pair, blank=True) if source.columns.pair else None

    def make(numbers: Sequence[int]) -> list[Row]:
        others = [pairs[number] for number in numbers] if pairs is not None else None
        return list(encoder.rows(encoder([texts[number] for number in numbers], others, rows=numbers)))

    return Rows(make, range(len(texts)))


MAKERS: dict[str, Callable[[Source], Rows]] = {
    "sequence-classification": _classified,
    "token-classification": structured.tagged,
    "question-answering": structured.answered,
    "multiple-choice": structured.chosen,
    "masked-lm": _hidden,
    "causal-lm": _continued,
    "image-text-to-text": _continued,
    "seq2seq-lm": _translated,
    "features": _described,
}


# --- their parts ---


def _problem(task: Task) -> str | None:
    return getattr(task, "problem", None)


def _texts(source: Source) -> list[str]:
    """The texts, all of which have tokens: a tokenizer that adds none of its own may make nothing of a blank."""
    texts, encoder = texts_in(source.table, source.text), source.encoder
    encoder.refuse_unknown(texts)
    if encoder.tokenizer.num_special_tokens_to_add() == 0:
        for row, count in enumerate(encoder.counts(texts)):
            encoder.check([range(min(count, 1))], [row])
    return texts


def _or_blank(value: Any) -> str:
    return "" if missing(value) else str(value)


def _say_left_out(count: int, total: int) -> None:
    if count:
        log.warning(
            "%d of %d texts have no two tokens, so there is nothing to predict; they are left out.", count, total
        )


def _hider(encoder: Encoder, seed: int) -> Callable[[Row, int], Row]:
    """Hides a share of a row's tokens, seeded by the row's number, so that other rows change nothing; the model has to
    say what they were."""
    mask = encoder.tokenizer.mask_token_id
    if mask is None:
        raise DataError("The tokenizer has no mask token, so it cannot make data for a masked language model.")
    special = torch.tensor(encoder.tokenizer.all_special_ids)

    def hide(row: Row, number: int) -> Row:
        ids = row["input_ids"]
        state = numpy.random.SeedSequence([seed % 2**63, number]).generate_state(1, numpy.uint64)
        generator = torch.Generator().manual_seed(int(state[0]))
        ordinary = ~torch.isin(ids, special)
        draw = torch.rand(len(ids), generator=generator).masked_fill(~ordinary, 2.0)
        hidden = draw < MASKED_SHARE
        if not hidden.any() and ordinary.any():
            hidden[draw.argmin()] = True
        return {**row, "labels": ids.masked_fill(~hidden, IGNORED), "input_ids": ids.masked_fill(hidden, mask)}

    return hide
