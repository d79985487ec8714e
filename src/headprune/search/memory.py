"""The memory limit of the caches of a run, and how they share it.

A smaller one takes longer, with the same results: sites are scored in more groups, more layers run again, and outputs
of the dense model are read from a temporary folder.
"""

from __future__ import annotations

import re
from typing import Any

from headprune.errors import ScheduleError
from headprune.measure.evaluator import CACHE_BYTES
from headprune.repair.dense_targets import TARGET_BYTES
from headprune.signals.tokens import TOKEN_BYTES

DEFAULT = TOKEN_BYTES + TARGET_BYTES + CACHE_BYTES
UNITS = ("", "K", "M", "G", "T")  # each 1,024 of the one before


def parse_memory(value: Any) -> int:
    """Bytes from a whole number, or from a text such as 4GB or 500 MB."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", str(value), re.IGNORECASE)
    size = int(float(match[1]) * 1024 ** UNITS.index(match[2].upper())) if match else 0
    if size < 1:
        raise ScheduleError(f"memory takes a size such as 4GB, not {value!r}.")
    return size


def token_bytes(memory: int) -> int:
    """The limit of the tokens of sites that are scored together."""
    return memory * TOKEN_BYTES // DEFAULT


def cache_bytes(memory: int) -> int:
    """The limit of cached outputs of layers on the evaluation data."""
    return memory * CACHE_BYTES // DEFAULT


def target_bytes(memory: int) -> int:
    """The limit of outputs of the dense model, the targets of repairs, that are kept in memory."""
    return memory * TARGET_BYTES // DEFAULT
