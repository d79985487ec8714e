"""Helpers for batches: number of samples, device, rows, and the mask of tokens that are not padding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from headprune import distributed
from headprune.progress import tracked

IGNORED = -100  # the label of ignored tokens, as in transformers
# Below this an additive mask masks a key, whose probability is 0 then in every precision: masks have -10000, -1e9, -inf
# or the least number of their precision there.
MASKED = -1e3


GRIDS = ("grid_thw", "grid_hws", "grid_hw")  # ends of the names of entries with the numbers of patches of every image


def batch_size(batch: Mapping[str, Any]) -> int:
    """The number of samples of a batch. Token ids come first, then the sizes of images: images may be patches of all
    samples in one row."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor) and value.dim()}
    text_inputs = (tensors[name] for name in ("input_ids", "inputs_embeds") if name in tensors)
    grids = (value for name, value in tensors.items() if name.endswith(GRIDS))
    return int(next(iter([*text_inputs, *grids, *tensors.values()])).shape[0])


class Numbered(NamedTuple):
    """A batch with its number, and the number of its first sample."""

    number: int
    first: int  # index of its first sample in the data
    batch: Mapping[str, Any]


def own_batches(batches: Iterable[Mapping[str, Any]], phase: str = "") -> Iterator[Numbered]:
    """The batches of this process: all of them, or its share where there are several processes. Progress is reported
    as this `phase`."""
    numbered: Iterable[Numbered] = _numbered(batches)
    if distributed.is_distributed():
        everything = list(numbered)
        mine = set(distributed.my_share([_elements(each.batch) for each in everything]))
        numbered = [each for each in everything if each.number in mine]
    elif isinstance(batches, Sequence):
        numbered = list(numbered)
    if not phase:
        return iter(numbered)
    total = sum(batch_size(each.batch) for each in numbered) if isinstance(numbered, list) else None  # not of a stream
    return tracked(numbered, phase, total, unit="sample", size=lambda each: batch_size(each.batch))


def _numbered(batches: Iterable[Mapping[str, Any]]) -> Iterator[Numbered]:
    first = 0
    for number, batch in enumerate(batches):
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


def rows_of(batch: Mapping[str, Any], rows: slice, packed: Mapping[str, Sequence[int]] | None = None) -> dict[str, Any]:
    """These samples of a batch; entries without a sample axis stay the same. Of `packed` entries, each sample has the
    given number of rows, and they are left out where these samples have none."""
    size = batch_size(batch)
    packed = packed or {}
    ids = batch["input_ids"].shape if "input_ids" in batch else None

    def part(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if name in packed:
            return torch.cat(value.split(list(packed[name]))[rows])
        if name == "position_ids" and value.shape[1:] == ids:  # [time, height and width, samples, tokens]
            return value[:, rows]
        return value[rows] if value.shape[:1] == (size,) else value

    return {name: part(name, value) for name, value in batch.items() if name not in packed or any(packed[name][rows])}


def real_keys(mask: Any) -> torch.Tensor | None:
    """Bool [.. x tokens] from an attention mask in any format of transformers.

    A mask of queries by keys, [batch, 1, queries, keys] or [batch, queries, keys], boolean or additive, has the keys
    that each query may attend to: a token to which no query may attend is padding. Rows of queries that are padding
    themselves do not count: transformers lets those in front of a text attend to every key, as a softmax over no keys
    is NaN. A dictionary has one mask per type of layer.
    """
    if isinstance(mask, Mapping):
        mask = next(iter(mask.values()), None)
    if mask is None:
        return None
    if mask.dim() <= 2:
        return mask.bool()
    if mask.dtype != torch.bool and (mask < 0).any():
        allowed = mask > MASKED
    elif mask.is_floating_point() and not (mask == 1).any():
        allowed = torch.ones_like(mask, dtype=torch.bool)  # an additive mask without masked keys
    else:
        allowed = mask.bool()
    if allowed.dim() == 4:
        allowed = allowed.any(1)
    everything = allowed.all(-1)
    limited_later = (~everything).flip(1).cumsum(1).flip(1) > 0  # a real query is limited no less than those after it
    return (allowed & ~(everything & limited_later)[..., None]).any(1)
