"""Silences exporters, and shortens their error messages."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

LONGEST = 200  # characters of a message


def reason(error: BaseException) -> str:
    """The first cause in one line: messages of exporters are pages long."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Without logs, warnings and progress bars of exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        # Progress bars go to stdout, which is for results.
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
