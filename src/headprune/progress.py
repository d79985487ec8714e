"""Progress bars of calls from Python: shown in terminals and notebooks by default."""

from __future__ import annotations

import sys
from typing import Any


def shows_progress(show: bool | None) -> bool:
    """`show` where it is set, otherwise whether stderr is a terminal or this is a notebook."""
    if show is not None:
        return show
    terminal = sys.stderr is not None and sys.stderr.isatty()
    return terminal or "ipykernel" in sys.modules


def progress_bar(description: str, total: int | None, *, unit: str, show: bool | None = None) -> Any:
    """A bar of tqdm on stderr, or a widget in a notebook, to be used as a context manager; it is
    disabled where `shows_progress` is False."""
    from tqdm.auto import tqdm

    return tqdm(total=total, desc=description, unit=f" {unit}", disable=not shows_progress(show), dynamic_ncols=True)
