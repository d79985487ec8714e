"""Attention probabilities in blocks of queries, so that for long texts no map of all queries and keys is in memory.

A row of attention does not depend on other rows: the family's eager function returns the same for some of the queries
as for all, with its scaling, its cap, its sinks. Where that does not hold, which is tested, the map is computed at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from headprune.batches import MASKED, widened

BLOCK = 1 << 22  # bytes of probabilities in float32 of one block
MIN_QUERIES = 32  # of a block, however many keys and heads there are
TOLERANCE = 1e-3  # by which float32 probabilities of large scores may differ when a product has another shape
ALONG_QUERIES = ("position_bias",)  # options of eager functions that have a row for each query

_independent: dict[tuple[Any, ...], bool] = {}  # by eager function and its tensor options: whether rows are independent


@dataclass(frozen=True)
class Rows:
    """The attention of a block of queries to all keys."""

    probabilities: torch.Tensor  # [batch, heads, these queries, keys]
    mask: torch.Tensor | None  # of these queries: additive or bool, None where nothing is masked
    first: int  # of these queries
    queries: int  # in all


@dataclass(frozen=True)
class Attention:
    """One call of a family's attention function."""

    eager: Callable[..., Any]
    module: nn.Module
    query: torch.Tensor  # [batch, heads, queries, width]
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    options: Mapping[str, Any]
    is_eager: bool = False  # whether the model itself computes it with the eager function

    @property
    def queries(self) -> int:
        return int(self.query.shape[2])

    @property
    def implies_causal(self) -> bool:
        """Whether attention is causal without a mask tensor, by the option `is_causal`, which eager functions do not
        read."""
        if self.is_eager:
            return False
        option = self.options.get("is_causal")
        causal = getattr(self.module, "is_causal", True) if option is None else option
        return self.mask is None and bool(causal) and self.queries > 1

    def block_mask(self, first: int, end: int) -> torch.Tensor | None:
        """The mask of these queries; as a tensor also where it follows from `is_causal`."""
        keys = self.key.shape[-2]
        if self.mask is not None:
            return _rows_of(self.mask, self.queries, first, end)[..., :keys]
        if self.implies_causal:
            positions = torch.arange(first, end, device=self.query.device)
            return (torch.arange(keys, device=self.query.device) <= positions[:, None])[None, None]
        return None

    def part(self, first: int, end: int) -> tuple[torch.Tensor, Rows]:
        """(output, rows) of these queries."""
        mask = self.block_mask(first, end)
        options = {
            name: _rows_of(value, self.queries, first, end) if name in ALONG_QUERIES and value is not None else value
            for name, value in self.options.items()
        }
        query = self.query[:, :, first:end]
        output, weights = self.eager(self.module, query, self.key, self.value, additive(mask, query), **options)
        return output, Rows(weights, mask, first, self.queries)

    def parts(self, *, whole: bool) -> Iterator[tuple[torch.Tensor, Rows]]:
        """All queries, `in_blocks` or at once."""
        size = self.block_size() if self.in_blocks(whole=whole) else self.queries
        for first in range(0, self.queries, size):
            yield self.part(first, min(first + size, self.queries))

    def in_blocks(self, *, whole: bool) -> bool:
        """Whether the map is computed in blocks: it is large, not wanted `whole`, and no row depends on others."""
        return not whole and self.block_size() < self.queries and self.rows_are_independent()

    def block_size(self) -> int:
        row = self.query.shape[0] * self.query.shape[1] * self.key.shape[-2] * 4
        return max(MIN_QUERIES, BLOCK // row)

    def rows_are_independent(self) -> bool:
        """Whether a row is the same alone as among others; tested once for a function, on its first queries."""
        tensors = tuple(sorted(name for name, value in self.options.items() if isinstance(value, torch.Tensor)))
        key = (self.eager, tensors, self.mask is None)
        if key not in _independent:
            _independent[key] = self.query.dim() == 4 and self._test_independence()
        return _independent[key]

    def _test_independence(self) -> bool:
        wide = replace(self, query=widened(self.query), key=widened(self.key), value=widened(self.value))
        middle = MIN_QUERIES // 2
        row = slice(middle, middle + 1)
        try:
            (output, among), (output_alone, alone) = wide.part(0, MIN_QUERIES), wide.part(middle, middle + 1)
        except (
            RuntimeError,
            IndexError,
            ValueError,
        ):  # an option with a row per query is not in ALONG_QUERIES
            return False
        pairs = ((among.probabilities[:, :, row], alone.probabilities), (output[:, row], output_alone))
        return all(
            a.shape == b.shape and torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
            for a, b in pairs
        )


def allowed_keys(mask: torch.Tensor) -> torch.Tensor:
    """An additive or bool mask as bool: True where a query may attend to a key."""
    return mask if mask.dtype == torch.bool else mask > MASKED


def additive(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """A bool mask as numbers that are added to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    # Many families compute the softmax in float32: a number below its minimum would be minus infinity there, and a row
    # of padding, in which all keys are masked, NaN.
    least = max(torch.finfo(like.dtype).min, torch.finfo(torch.float32).min)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, least)


def _rows_of(tensor: torch.Tensor, queries: int, first: int, end: int) -> torch.Tensor:
    return tensor[..., first:end, :] if tensor.dim() > 1 and tensor.shape[-2] == queries else tensor
