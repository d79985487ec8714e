"""Training data of every form as rows, which are shuffled and collated into new batches."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import nn

from headprune.data import Examples
from headprune.data.batching import collate
from headprune.errors import DataError
from headprune.tasks import IGNORED, batch_size
from headprune.tasks.checks import checked_batches

Row = Mapping[str, Any]


class RowSubset(Sequence[Row]):
    """Some rows of a data set, converted to tensors when they are read."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> RowSubset: ...

    def __getitem__(self, index: int | slice) -> Row | RowSubset:
        if isinstance(index, slice):
            return RowSubset(self.dataset, self.indices[index])
        return _as_tensors(self.dataset[self.indices[index]])

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))


class Collator:
    """Collates rows into a batch; a class, so that it can be pickled for worker processes."""

    def __init__(self, padding: Mapping[str, int]) -> None:
        self.padding = dict(padding)

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        return collate(rows, self.padding)


def as_examples(data: Any, model: nn.Module) -> Examples:
    """Examples from examples, from batches, or from a data set whose rows are inputs of the model."""
    if isinstance(data, Examples):
        examples = data
    elif _is_dataset(data):
        examples = Examples(RowSubset(data, range(len(data))), _padding(model))
    else:
        examples = Examples(_rows_of(data, model), _padding(model))
    if not len(examples):
        raise DataError("There is no training data; give at least one sample.")
    return examples


def split(examples: Examples, share: float, seed: int) -> tuple[Examples, Examples]:
    """The rows to train on, and a share of them, drawn by the seed, that is held out; both have at least one row."""
    if len(examples) < 2:
        raise DataError("One sample cannot be split into training and validation data; give more, or validation=0.")
    count = min(max(1, round(share * len(examples))), len(examples) - 1)
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out, rest = (RowSubset(examples.rows, sorted(indices)) for indices in (order[:count], order[count:]))
    return Examples(rest, examples.padding), Examples(held_out, examples.padding)


def _is_dataset(data: Any) -> bool:
    """Whether it is a map-style data set of rows; a list of batches is none."""
    if isinstance(data, torch.utils.data.IterableDataset):
        raise DataError("Training data is shuffled, so it needs a length; give a map-style data set or a list.")
    return hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (list, tuple, Mapping))


def _as_tensors(row: Any) -> Row:
    """A row as tensors. Data sets say "label" for one label, and keep texts beside the inputs of a model."""
    if not isinstance(row, Mapping):
        raise DataError(f"A row of training data must be a dict of the model's inputs, not {row!r:.60}.")
    tensors = {}
    for name, value in row.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif value is not None and not isinstance(value, (str, bytes)):
            try:
                tensors[name] = torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError):
                continue  # lists of texts and other columns that are no inputs
    if "label" in tensors and "labels" not in tensors:
        tensors["labels"] = tensors.pop("label")
    return tensors


def _rows_of(batches: Iterable[Mapping[str, Any]], model: nn.Module) -> list[Row]:
    """Every sample of the batches as a row, with its padding."""
    rows: list[Row] = []
    for number, batch in enumerate(checked_batches(batches, model)):
        size = batch_size(batch)
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor) or value.shape[:1] != (size,):
                raise DataError(
                    f"{name!r} of batch {number} is not one tensor row per sample, so its samples cannot be put into "
                    "other batches; leave it out, or give a data set of rows."
                )
        rows += [{name: value[row] for name, value in batch.items()} for row in range(size)]
    lengths = {row["input_ids"].shape for row in rows if "input_ids" in row}
    if len(lengths) > 1 and not any("attention_mask" in row for row in rows):
        # Rows of different lengths get padding when they are mixed, so they need a mask.
        rows = [{**row, "attention_mask": torch.ones_like(row["input_ids"])} for row in rows]
    if len({frozenset(row) for row in rows}) > 1:
        raise DataError("Some batches have entries that others have not; give the same to all of them.")
    return rows


def _padding(model: nn.Module) -> dict[str, int]:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    pad = getattr(text, "pad_token_id", None)
    filler = pad if isinstance(pad, int) and pad >= 0 else 0
    return {"input_ids": filler, "decoder_input_ids": filler, "labels": IGNORED}


COMPARED = 256  # rows that a digest of many looks at


def row_digest(row: Row, leave_out: Collection[str] = ()) -> bytes:
    """A short hash of the content of a row."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(set(row) - set(leave_out)):
        value = torch.as_tensor(row[name])
        digest.update(f"{name} {list(value.shape)} {value.dtype}".encode())
        digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else b"")
        digest.update(b"" if value.dim() else repr(value.item()).encode())
    return digest.digest()


def rows_digest(rows: Sequence[Row]) -> str:
    """A hash of up to COMPARED rows at equal distances."""
    digest = hashlib.blake2b(str(len(rows)).encode(), digest_size=16)
    for index in sorted({number * len(rows) // COMPARED for number in range(min(len(rows), COMPARED) and COMPARED)}):
        digest.update(row_digest(rows[index]))
    return digest.hexdigest()
