"""Examples of different lengths, and batches of them with little padding."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from headprune.data.lazy_rows import Rows
from headprune.errors import DataError
from headprune.progress import tracked
from headprune.tasks import IGNORED

OVERHEAD = (
    64  # the cost of one more batch in padded tokens, at least; the length of the longest sample where that is more
)
TARGETS = ("labels", "start_positions")  # one of them is in every labelled row


@dataclass(frozen=True)
class Examples:
    """Model inputs, one dict of unpadded tensors per example."""

    rows: Sequence[Mapping[str, torch.Tensor]]
    padding: Mapping[str, int]  # padding value by column; 0 for a column that is not in it

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def has_labels(self) -> bool:
        return len(self.rows) > 0 and any(name in self.rows[0] for name in TARGETS)

    def select(self, indices: Sequence[int]) -> Examples:
        if isinstance(self.rows, Rows):
            return Examples(self.rows.select(indices), self.padding)
        return Examples([self.rows[index] for index in indices], self.padding)

    def sample(self, count: int | None, seed: int = 0) -> Examples:
        """A seeded random sample of `count` examples in their original order; all examples if there are fewer."""
        if count is None or count >= len(self):
            return self
        if count < 1:
            raise DataError(f"The number of samples must be at least 1, but it is {count}.")
        return self.split(count, seed)[0]

    def split(self, count: int, seed: int) -> tuple[Examples, Examples]:
        """A seeded random sample of `count` examples, and the rest, both in their original order."""
        permutation = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).tolist()
        return self.select(sorted(permutation[:count])), self.select(sorted(permutation[count:]))

    def order(self) -> list[int]:
        """The order of the examples in `batches`: by length, so that neighbours need little padding."""
        rows = tracked(self.rows, "preparing inputs", len(self), unit="row")
        lengths = [_length(row) for row in rows]
        return sorted(range(len(self)), key=lambda index: (lengths[index], index))

    def batches(self, size: int = 32, *, full: bool = False) -> list[dict[str, torch.Tensor]]:
        """Batches of at most `size` samples, split where lengths change so that there is little padding; with `full`,
        all batches but the last have `size` samples."""
        if size < 1:
            raise DataError(f"A batch needs at least one sample, but the batch size is {size}.")
        order = self.order()
        ends = _batch_ends([0 if full else _length(self.rows[index]) for index in order], size)
        return [self._collate(order[start:end]) for start, end in itertools.pairwise([0, *ends])]

    def longest(self, size: int) -> dict[str, torch.Tensor]:
        """One batch of the `size` longest samples, for measurements of time and memory."""
        return self._collate(self.order()[-size:])

    def _collate(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        return collate([self.rows[index] for index in indices], self.padding)


def _batch_ends(lengths: Sequence[int], size: int) -> list[int]:
    """Where to end batches of samples in order of length, so that padding plus the cost of each batch is least."""
    count = len(lengths)
    if not count or lengths[0] == lengths[-1]:
        return [*range(size, count, size), *([count] if count else [])]
    overhead = max(OVERHEAD, lengths[-1])
    cost, ends = [0] * (count + 1), [count] * count  # from each sample on: the cost, and the end of its batch
    for first in range(count - 1, -1, -1):
        last = min(first + size, count)
        # Ends between samples of equal length save nothing, so they are skipped; of equal costs, the last end wins.
        choices = [end for end in range(last, first, -1) if end == last or lengths[end] > lengths[end - 1]]
        costs = [lengths[end - 1] * (end - first) + cost[end] for end in choices]
        best = min(range(len(costs)), key=costs.__getitem__)
        cost[first], ends[first] = costs[best] + overhead, choices[best]
    result, end = [], 0
    while end < count:
        end = ends[end]
        result.append(end)
    return result


def collate(rows: Sequence[Mapping[str, torch.Tensor]], padding: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """One batch of these rows, padded to the longest."""
    batch = {}
    for name in rows[0]:
        fill = padding.get(name, IGNORED if name == "labels" else 0)
        batch[name] = _stack_padded([row[name] for row in rows], fill)
    return batch


def _stack_padded(values: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
    """All values in one tensor, padded at the end of each axis to the size of the largest."""
    if len({value.shape for value in values}) == 1:
        return torch.stack(list(values))
    shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    padded = []
    for value in values:
        lengths = [target - size for target, size in zip(shape, value.shape, strict=True)]
        padded.append(functional.pad(value, [side for length in reversed(lengths) for side in (0, length)], value=fill))
    return torch.stack(padded)


def _length(row: Mapping[str, Any]) -> int:
    """The largest number of tokens in a row; multi-hot labels and regression targets are no tokens."""
    return max((int(value.shape[-1]) for name, value in row.items() if _is_tokens(name, value)), default=0)


def _is_tokens(name: str, value: torch.Tensor) -> bool:
    if value.dim() == 1:
        return not (name == "labels" and value.is_floating_point())
    return value.dim() == 2 and not value.is_floating_point()  # of several choices
