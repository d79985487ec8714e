"""Text for classifiers, regressors and language models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from headprune.data.batches import Examples
from headprune.errors import DataError
from headprune.task import IGNORED, task_of

if TYPE_CHECKING:
    from headprune.data.sources import Columns

MASKED_SHARE = 0.15  # of the tokens, as BERT was trained


def from_table(
    model: PreTrainedModel,
    table: Mapping[str, Sequence[Any]],
    columns: Columns,
    processor: str | Path,
    max_length: int,
    seed: int,
) -> Examples:
    tokenizer = load_tokenizer(processor)
    text = [str(value) for value in table[columns.text or ""]]
    pair = [str(value) for value in table[columns.pair]] if columns.pair else None
    encoded = tokenizer(text, pair, truncation=True, max_length=_limit(model, max_length))
    rows = _rows(encoded)
    if task_of(model).name == "causal-lm":  # one token has nothing to predict
        rows = [row for row in rows if len(row["input_ids"]) > 1]
    if type(model).__name__.endswith("ForMaskedLM"):
        rows = _masked(rows, tokenizer, seed)
    elif model.config.is_encoder_decoder and "ConditionalGeneration" in type(model).__name__:
        if columns.label is not None:
            targets = tokenizer(
                text_target=[str(value) for value in table[columns.label]], truncation=True, max_length=max_length
            )
            for row, ids in zip(rows, targets["input_ids"], strict=True):
                row["labels"] = torch.tensor(ids)
    elif columns.label is not None and not task_of(model).name == "causal-lm":
        for row, label in zip(rows, label_ids(model, table[columns.label], columns.label), strict=True):
            row["labels"] = label
    return Examples(rows, _padding(tokenizer))


def from_plain_text(model: PreTrainedModel, text: str, processor: str | Path, max_length: int, seed: int) -> Examples:
    """One text cut into blocks of `max_length` tokens: for language models, which need no labels."""
    masked = type(model).__name__.endswith("ForMaskedLM")
    if not (masked or task_of(model).name == "causal-lm"):
        raise DataError(
            f"Plain text is data for a language model, and {type(model).__name__} is none; give a table with a text "
            "column."
        )
    tokenizer = load_tokenizer(processor)
    block = _limit(model, max_length)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    # A last block that is shorter than the others would be as good as any, but one token has nothing to predict.
    rows = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(block) if len(part) > 1]
    return Examples(_masked(rows, tokenizer, seed) if masked else rows, _padding(tokenizer))


def load_tokenizer(place: str | Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise DataError(
            f"No tokenizer was found at {place} ({type(error).__name__}); save it there, or name another place with "
            "--processor."
        ) from None


def label_ids(model: PreTrainedModel, labels: Sequence[Any], column: str) -> list[torch.Tensor]:
    """Labels as the model counts them: numbers as they are, names through the config's label2id."""
    if model.config.num_labels == 1 or model.config.problem_type == "regression":
        try:
            numbers = [float(label) for label in labels]
        except (TypeError, ValueError):
            numbers = [math.nan]
        if not all(map(math.isfinite, numbers)):
            raise DataError(f"Column {column!r} must hold numbers for a regression model.")
        return [torch.tensor(number) for number in numbers]
    known = {str(name): index for name, index in (model.config.label2id or {}).items()}
    result = []
    for row, label in enumerate(labels):
        index = known.get(str(label))
        if index is None:
            try:
                index = int(label)
                if isinstance(label, float) and label != index:
                    raise ValueError
            except (TypeError, ValueError, OverflowError):
                names = ", ".join(list(known)[:5])
                raise DataError(
                    f"Label {label!r} in row {row} of column {column!r} is none of the model's labels ({names}, ...)."
                ) from None
        if not 0 <= index < model.config.num_labels:
            raise DataError(
                f"Label {index} in row {row} of column {column!r} is out of range: the model has "
                f"{model.config.num_labels} labels, numbered 0 to {model.config.num_labels - 1}."
            )
        result.append(torch.tensor(index))
    return result


def _limit(model: PreTrainedModel, max_length: int) -> int:
    """At most what the position table holds; RoBERTa's kin start counting after the padding id."""
    if max_length < 2:
        raise DataError(f"max_length must be at least 2, but it is {max_length}.")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return min(max_length, positions - 2) if isinstance(positions, int) and positions > 4 else max_length


def _rows(encoded: Mapping[str, Any]) -> list[dict[str, torch.Tensor]]:
    names = [name for name in ("input_ids", "token_type_ids", "attention_mask") if name in encoded]
    count = len(encoded["input_ids"])
    return [{name: torch.tensor(encoded[name][row], dtype=torch.long) for name in names} for row in range(count)]


def _padding(tokenizer: Any) -> dict[str, int]:
    pad = tokenizer.pad_token_id
    return {"input_ids": pad if pad is not None else (tokenizer.eos_token_id or 0), "labels": IGNORED}


def _masked(rows: list[dict[str, torch.Tensor]], tokenizer: Any, seed: int) -> list[dict[str, torch.Tensor]]:
    """Hide a seeded share of each row's tokens; the model has to say what they were."""
    if tokenizer.mask_token_id is None:
        raise DataError("The tokenizer has no mask token, so it cannot make data for a masked language model.")
    generator = torch.Generator().manual_seed(seed)
    special = torch.tensor(tokenizer.all_special_ids)
    for row in rows:
        ids = row["input_ids"]
        draw = torch.rand(len(ids), generator=generator).masked_fill(torch.isin(ids, special), 2.0)
        hidden = draw < MASKED_SHARE
        if not hidden.any():
            hidden[draw.argmin()] = True
        row["labels"] = ids.masked_fill(~hidden, IGNORED)
        row["input_ids"] = ids.masked_fill(hidden, tokenizer.mask_token_id)
    return rows
