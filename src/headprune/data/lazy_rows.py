"""Rows that are computed on first access, so that a small sample costs little."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

import torch

Row = Mapping[str, torch.Tensor]
CHUNK = 256  # rows computed together in iteration: tokenizers are faster on many texts


class Rows(Sequence[Row]):
    """Some rows of a source, by their numbers in it. Selections share one cache."""

    def __init__(
        self,
        make: Callable[[Sequence[int]], Sequence[Row]],
        numbers: Sequence[int],
        cache: dict[int, Row] | None = None,
    ) -> None:
        self._make = make
        self.numbers = numbers
        self._cache: dict[int, Row] = {} if cache is None else cache

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Rows: ...

    def __getitem__(self, index: int | slice) -> Row | Rows:
        if isinstance(index, slice):
            return Rows(self._make, self.numbers[index], self._cache)
        number = self.numbers[index]
        self._ensure([number])
        return self._cache[number]

    def __iter__(self) -> Iterator[Row]:
        for start in range(0, len(self.numbers), CHUNK):
            chunk = self.numbers[start : start + CHUNK]
            self._ensure(chunk)
            yield from (self._cache[number] for number in chunk)

    def select(self, indices: Sequence[int]) -> Rows:
        return Rows(self._make, [self.numbers[index] for index in indices], self._cache)

    def _ensure(self, numbers: Sequence[int]) -> None:
        uncached = [number for number in numbers if number not in self._cache]
        if uncached:
            self._cache.update(zip(uncached, self._make(uncached), strict=True))
