"""The order of the training rows, drawn from the seed and the epoch: rows of similar length share a batch, so that
little of it is padding, and batches of all lengths are mixed.

transformers' own sampler of this kind (`train_sampling_strategy="group_by_length"`) draws from the global random
numbers, so a training that was killed within an epoch would go on with another order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler

POOL = 50  # batches that are drawn together before their rows are sorted by length


class SimilarLengthSampler(Sampler[int]):
    """Every row once per epoch; the order depends on nothing but the lengths, the seed and the epoch."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self), generator=generator).tolist()
        batches: list[list[int]] = []
        for start in range(0, len(order), POOL * self.batch_size):
            pool = sorted(order[start : start + POOL * self.batch_size], key=lambda row: self.lengths[row])
            batches += [pool[at : at + self.batch_size] for at in range(0, len(pool), self.batch_size)]
        # A batch that is not full stays at the end, where it does not break up the others.
        full = [batch for batch in batches if len(batch) == self.batch_size]
        rest = [row for batch in batches if len(batch) < self.batch_size for row in batch]
        for number in torch.randperm(len(full), generator=generator).tolist():
            yield from full[number]
        yield from rest


class BatchShares(Sampler[list[int]]):
    """Batches of all processes together, divided among them: every step sees the rows that it would see in one process.
    A last batch with fewer rows than processes goes to all of them whole, which leaves its mean as it is."""

    def __init__(self, order: SimilarLengthSampler, batch_size: int, world_size: int = 1, rank: int = 0) -> None:
        self.order, self.batch_size, self.world_size, self.rank = order, batch_size, world_size, rank

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        rows = list(self.order)
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            first, end = (len(batch) * rank // self.world_size for rank in (self.rank, self.rank + 1))
            yield batch[first:end] if len(batch) >= self.world_size else batch


def row_lengths(rows: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Tokens of each row, or samples of sound; None where rows do not differ in length."""
    first = rows[0] if len(rows) else {}
    for name in ("input_ids", "input_values", "input_features"):
        if isinstance(first.get(name), torch.Tensor) and first[name].dim():
            lengths = [int(row[name].shape[-1]) for row in rows]
            return lengths if len(set(lengths)) > 1 else None
    return None
