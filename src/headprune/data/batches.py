"""Examples of different lengths, and batches of them that waste little on padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headprune.errors import DataError
from headprune.task import IGNORED


@dataclass(frozen=True)
class Examples:
    """Model inputs, one dict of unpadded tensors per example."""

    rows: Sequence[Mapping[str, torch.Tensor]]
    padding: Mapping[str, int]  # value that fills a column up; 0 where a column is not named

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def has_labels(self) -> bool:
        return bool(self.rows) and "labels" in self.rows[0]

    def select(self, indices: Sequence[int]) -> Examples:
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
        return sorted(range(len(self)), key=lambda index: (_length(self.rows[index]), index))

    def batches(self, size: int = 32) -> list[dict[str, torch.Tensor]]:
        if size < 1:
            raise DataError(f"A batch needs at least one sample, but the batch size is {size}.")
        order = self.order()
        return [self._collate(order[start : start + size]) for start in range(0, len(order), size)]

    def _collate(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        rows = [self.rows[index] for index in indices]
        batch = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            if values[0].dim() == 1:
                fill = self.padding.get(name, IGNORED if name == "labels" else 0)
                batch[name] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
            else:
                batch[name] = torch.stack(values)
        return batch


def _length(row: Mapping[str, Any]) -> int:
    return max((int(value.shape[0]) for value in row.values() if value.dim() == 1), default=0)
