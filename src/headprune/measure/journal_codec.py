"""Encodes thousands of neurons in a line of a journal: removed ones as ranges or bits, their scores as deciles."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy
import torch

from headprune.units.members import Member, by_site
from headprune.units.slicing.record import from_ranges, to_ranges

BITS = "bits:"
Deciles = tuple[float, ...]  # least, 10 %, .., 90 %, largest


def encode_neurons(neurons: Iterable[Member]) -> dict[str, str]:
    """site -> its ids as "0-3,7", or as a bit per neuron, compressed, where that is shorter as they are scattered."""
    result = {}
    for site, ids in sorted(by_site(neurons).items()):
        removed = numpy.zeros(max(ids) + 1, dtype=bool)
        removed[ids] = True
        bits = BITS + base64.b64encode(zlib.compress(numpy.packbits(removed).tobytes(), 9)).decode()
        result[str(site)] = min(to_ranges(ids), bits, key=len)
    return result


def decode_neurons(texts: Mapping[str, str]) -> list[Member]:
    """In the order of site and id."""
    members = []
    for site, text in texts.items():
        if text.startswith(BITS):
            raw = _decompress(base64.b64decode(text.removeprefix(BITS)))
            ids = numpy.unpackbits(numpy.frombuffer(raw, numpy.uint8)).nonzero()[0].tolist()
        else:
            ids = from_ranges(text)
        members += [Member(int(site), index) for index in ids]
    return sorted(members)


def _decompress(raw: bytes) -> bytes:
    try:
        return zlib.decompress(raw)
    except zlib.error as error:
        raise ValueError(f"the neurons of a step cannot be read: {error}") from None


def deciles(scores: torch.Tensor, first: int) -> dict[int, Deciles | None]:
    """Deciles of each row from `first` on, with four digits; None for an empty row."""
    return {site: _deciles(scores[site]) for site in range(first, len(scores))}


def _deciles(row: torch.Tensor) -> Deciles | None:
    numbers = row[~row.isnan()].numpy()
    if not len(numbers):
        return None
    values: Sequence[float] = numpy.quantile(numbers, numpy.linspace(0, 1, 11)).tolist()
    return tuple(float(f"{value:.4g}") if math.isfinite(value) else math.nan for value in values)
