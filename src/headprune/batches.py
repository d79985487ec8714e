"""Batches as values: how many samples, on which device, which tokens of them are real."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from headprune import distributed

IGNORED = -100  # the label of what does not count, as everywhere in transformers


def batch_size(batch: Mapping[str, Any]) -> int:
    """Samples of a batch. Token ids count first: images may come as patches of all samples in one row."""
    named = (batch[name] for name in ("input_ids", "inputs_embeds") if isinstance(batch.get(name), torch.Tensor))
    tensors = (value for value in batch.values() if isinstance(value, torch.Tensor) and value.dim())
    return int(next(iter([*named, *tensors])).shape[0])


class Numbered(NamedTuple):
    """A batch and its place in all the data."""

    number: int
    first: int  # the number of its first sample
    batch: Mapping[str, Any]


def own_batches(batches: Iterable[Mapping[str, Any]]) -> Iterator[Numbered]:
    """The batches that this process goes over: all of them, or its share where there are several processes."""
    if distributed.is_distributed():
        listed = list(batches)
        mine = set(distributed.my_share([_elements(batch) for batch in listed]))
    else:
        listed, mine = batches, None  # type: ignore[assignment]  # which may be a stream
    first = 0
    for number, batch in enumerate(listed):
        if mine is None or number in mine:
            yield Numbered(number, first, batch)
        first += batch_size(batch)


def _elements(batch: Mapping[str, Any]) -> float:
    """What a batch costs, about: the elements of its largest entry."""
    return float(max(value.numel() for value in batch.values() if isinstance(value, torch.Tensor)))


def to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """In float32 where the tensor is in half precision: sums and products of many terms need it. Float64 stays."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def rows_of(batch: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    """These samples of a batch; what has no sample axis goes along as it is."""
    size = batch_size(batch)
    return {
        name: value[rows] if isinstance(value, torch.Tensor) and value.shape[:1] == (size,) else value
        for name, value in batch.items()
    }


def samples_of(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [rows_of(batch, slice(row, row + 1)) for row in range(batch_size(batch))]


def real_keys(mask: Any) -> torch.Tensor | None:
    """Bool [.. x tokens] from an attention mask of any form that transformers takes.

    A mask of queries by keys, [batch, 1, queries, keys] or [batch, queries, keys], boolean or added to the scores, says
    which keys each query may look at: a token that no query may look at is padding. A dictionary has one mask per kind
    of layer.
    """
    if isinstance(mask, Mapping):
        mask = next(iter(mask.values()), None)
    if mask is None:
        return None
    if mask.dim() <= 2:
        return mask.bool()
    if mask.is_floating_point() and (mask < 0).any():
        allowed = mask > torch.finfo(mask.dtype).min / 2
    elif mask.is_floating_point() and not (mask == 1).any():
        allowed = torch.ones_like(mask, dtype=torch.bool)  # added to the scores, and nothing is masked
    else:
        allowed = mask.bool()
    if allowed.dim() == 4:
        allowed = allowed.any(1)
    return allowed.any(1)
