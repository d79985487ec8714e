"""Examples of different lengths, and batches of them that waste little on padding."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from headprune.data.lazy import Rows
from headprune.errors import DataError
from headprune.tasks import IGNORED

OVERHEAD = 64  # padding that is as dear as one batch more, at the least: a sample of the longest there are
TARGETS = ("labels", "start_positions")  # one of them is in every row that has an answer


@dataclass(frozen=True)
class Examples:
    """Model inputs, one dict of unpadded tensors per example."""

    rows: Sequence[Mapping[str, torch.Tensor]]
    padding: Mapping[str, int]  # value that fills a column up; 0 where a column is not named

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def has_labels(self) -> bool:
        return len(self.rows) > 0 and any(name in self.rows[0] for name in TARGETS)

    def select(self, indices: Sequence[int]) -> Examples:
        if isinstance(self.rows, Rows):
            return Examples(self.rows.select(indices), self.padding)
        return Examples([self.rows[index] for index in indices], self.padding)

    def sample(self, count: int | None, seed: int) -> Examples:
        """A seeded draw of `count` examples, in their original order; all of them if there are fewer."""
        if count is None or count >= len(self):
            return self
        if count < 1:
            raise DataError(f"At least one sample is needed, but {count} were asked for.")
        return self.split(count, seed)[0]

    def split(self, count: int, seed: int) -> tuple[Examples, Examples]:
        """A seeded draw of `count` examples, and the others, both in their original order."""
        drawn = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed)).tolist()
        return self.select(sorted(drawn[:count])), self.select(sorted(drawn[count:]))

    def order(self) -> list[int]:
        """The order in which `batches` goes through the examples: by length, so that neighbours are alike."""
        lengths = [_length(row) for row in self.rows]
        return sorted(range(len(self)), key=lambda index: (lengths[index], index))

    def batches(self, size: int = 32, *, full: bool = False) -> list[dict[str, torch.Tensor]]:
        """Batches of at most so many samples, cut where lengths change so that little of them is padding; `full` ones,
        but for the last, have as many."""
        if size < 1:
            raise DataError(f"A batch needs at least one sample, but the batch size is {size}.")
        order = self.order()
        ends = _cuts([0 if full else _length(self.rows[index]) for index in order], size)
        return [self._collate(order[start:end]) for start, end in itertools.pairwise([0, *ends])]

    def longest(self, size: int) -> dict[str, torch.Tensor]:
        """One batch of so many samples, the longest there are: what times and memory are measured on."""
        return self._collate(self.order()[-size:])

    def _collate(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        return collate([self.rows[index] for index in indices], self.padding)


def _cuts(lengths: Sequence[int], size: int) -> list[int]:
    """Where batches of samples of rising lengths end, so that padding and the number of batches cost least."""
    count = len(lengths)
    if not count or lengths[0] == lengths[-1]:
        return [*range(size, count, size), *([count] if count else [])]
    overhead = max(OVERHEAD, lengths[-1])
    least, ends = [0] * (count + 1), [count] * count  # from each sample on: the cost, and the end of its batch
    for first in range(count - 1, -1, -1):
        full = min(first + size, count)
        # Of ends that cost the same the last; none lies among samples of one length, where it would save nothing.
        choices = [end for end in range(full, first, -1) if end == full or lengths[end] > lengths[end - 1]]
        costs = [lengths[end - 1] * (end - first) + least[end] for end in choices]
        best = min(range(len(costs)), key=costs.__getitem__)
        least[first], ends[first] = costs[best] + overhead, choices[best]
    cuts, end = [], 0
    while end < count:
        end = ends[end]
        cuts.append(end)
    return cuts


def collate(rows: Sequence[Mapping[str, torch.Tensor]], padding: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """One batch of these rows; shorter ones are filled up."""
    batch = {}
    for name in rows[0]:
        fill = padding.get(name, IGNORED if name == "labels" else 0)
        batch[name] = _stacked([row[name] for row in rows], fill)
    return batch


def _stacked(values: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
    """All values in one tensor, filled up at their ends to the size of the largest."""
    if len({value.shape for value in values}) == 1:
        return torch.stack(list(values))
    shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
    padded = []
    for value in values:
        lacking = [wide - own for wide, own in zip(shape, value.shape, strict=True)]
        padded.append(functional.pad(value, [part for lack in reversed(lacking) for part in (0, lack)], value=fill))
    return torch.stack(padded)


def _length(row: Mapping[str, Any]) -> int:
    """Of the longest row of tokens; flags and numbers to predict are no tokens."""
    return max((int(value.shape[-1]) for name, value in row.items() if _is_tokens(name, value)), default=0)


def _is_tokens(name: str, value: torch.Tensor) -> bool:
    if value.dim() == 1:
        return not (name == "labels" and value.is_floating_point())
    return value.dim() == 2 and not value.is_floating_point()  # of several choices
