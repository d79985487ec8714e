"""Helpers for batches: number of samples, device, rows, and the mask of tokens that are not padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from headprune import distributed

IGNORED = -100  # the label of ignored tokens, as in transformers


def batch_size(batch: Mapping[str, Any]) -> int:
    """The number of samples of a batch. Token ids come first: images may be patches of all samples in one row."""
    text_inputs = (batch[name] for name in ("input_ids", "inputs_embeds") if isinstance(batch.get(name), torch.Tensor))
    tensors = (value for value in batch.values() if isinstance(value, torch.Tensor) and value.dim())
    return int(next(iter([*text_inputs, *tensors])).shape[0])


class Numbered(NamedTuple):
    """A batch with its number, and the number of its first sample."""

    number: int
    first: int  # index of its first sample in the data
    batch: Mapping[str, Any]


def own_batches(batches: Iterable[Mapping[str, Any]]) -> Iterator[Numbered]:
    """The batches of this process: all of them, or its share where there are several processes."""
    if distributed.is_distributed():
        all_batches = list(batches)
        mine = set(distributed.my_share([_elements(batch) for batch in all_batches]))
    else:
        all_batches, mine = batches, None  # type: ignore[assignment]  # may be a stream
    first = 0
    for number, batch in enumerate(all_batches):
        if mine is None or number in mine:
            yield Numbered(number, first, batch)
        first += batch_size(batch)


def _elements(batch: Mapping[str, Any]) -> float:
    """The approximate cost of a batch: the elements of its largest entry."""
    return float(max(value.numel() for value in batch.values() if isinstance(value, torch.Tensor)))


def to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32 where it is in half precision, for sums and products of many terms; float64 stays."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def rows_of(batch: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    """These samples of a batch; entries without a sample axis stay the same."""
    size = batch_size(batch)
    return {
        name: value[rows] if isinstance(value, torch.Tensor) and value.shape[:1] == (size,) else value
        for name, value in batch.items()
    }


def samples_of(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [rows_of(batch, slice(row, row + 1)) for row in range(batch_size(batch))]


def real_keys(mask: Any) -> torch.Tensor | None:
    """Bool [.. x tokens] from an attention mask in any format of transformers.

    A mask of queries by keys, [batch, 1, queries, keys] or [batch, queries, keys], boolean or additive, has the keys
    that each query may attend to: a token to which no query may attend is padding. A dictionary has one mask per type
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
        allowed = torch.ones_like(mask, dtype=torch.bool)  # an additive mask without masked keys
    else:
        allowed = mask.bool()
    if allowed.dim() == 4:
        allowed = allowed.any(1)
    return allowed.any(1)
