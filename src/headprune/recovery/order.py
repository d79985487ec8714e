"""The order in which rows are trained on: drawn by the seed and the epoch, with rows of similar length in a batch, so
that little of it is padding, and batches of all lengths mixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

POOL = 50  # batches that are drawn together before their rows are sorted by length


class SimilarLengths(Sampler[int]):
    """Every row once per epoch. A resumed epoch has the order that it had."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0

    def __len__(self) -> int:
        return len(self.lengths)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

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
        for place in torch.randperm(len(full), generator=generator).tolist():
            yield from full[place]
        yield from rest


class Pieces(Sampler[list[int]]):
    """Batches of all processes together, cut into a piece for each: every step sees the rows that it would see in one
    process. A last batch with fewer rows than processes goes to all of them whole, which leaves its mean as it is."""

    def __init__(self, order: SimilarLengths, batch_size: int, processes: int, own: int) -> None:
        self.order, self.batch_size, self.processes, self.own = order, batch_size, processes, own

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        rows = list(self.order)
        for start in range(0, len(rows), self.batch_size):
            batch = rows[start : start + self.batch_size]
            first, last = (len(batch) * part // self.processes for part in (self.own, self.own + 1))
            yield batch[first:last] if len(batch) >= self.processes else batch


class Shared(DataLoader):
    """The pieces of one process; a Trainer tells it the epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def lengths_of(rows: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Tokens of each row, or samples of sound; None where rows do not differ in length."""
    first = rows[0] if len(rows) else {}
    for name in ("input_ids", "input_values", "input_features"):
        if isinstance(first.get(name), torch.Tensor) and first[name].dim():
            found = [int(row[name].shape[-1]) for row in rows]
            return found if len(set(found)) > 1 else None
    return None
