"""Rows that are made when they are first looked at, so that a draw of a few costs a few."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

import torch

Row = Mapping[str, torch.Tensor]
CHUNK = 256  # rows that are made together when all are wanted: tokenizers work on many texts at once


class Rows(Sequence[Row]):
    """Some rows of a source, by their numbers there. Selections share what has been made."""

    def __init__(
        self,
        make: Callable[[Sequence[int]], Sequence[Row]],
        numbers: Sequence[int],
        made: dict[int, Row] | None = None,
    ) -> None:
        self._make = make
        self.numbers = numbers
        self._made: dict[int, Row] = {} if made is None else made

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Rows: ...

    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            return Rows(self._make, self.numbers[index], self._made)
        number = self.numbers[index]
        self._ensure([number])
        return self._made[number]

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self.numbers), CHUNK):
            chunk = self.numbers[start : start + CHUNK]
            self._ensure(chunk)
            yield from (self._made[number] for number in chunk)

    def select(self, indices: Sequence[int]) -> Rows:
        return Rows(self._make, [self.numbers[index] for index in indices], self._made)

    def _ensure(self, numbers: Sequence[int]) -> None:
        wanted = [number for number in numbers if number not in self._made]
        if wanted:
            self._made.update(zip(wanted, self._make(wanted), strict=True))
