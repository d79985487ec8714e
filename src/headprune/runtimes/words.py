"""What exporters say: nothing on their own progress, and one line when something goes wrong."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

LONGEST = 200  # characters of somebody else's message


def reason(error: BaseException) -> str:
    """The first cause, in a line: messages of exporters are pages."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}"


@contextmanager
def quiet() -> Iterator[None]:
    """Without the remarks of exporters on their own progress."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        # Bars are drawn on stdout, which is for what was asked for.
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
