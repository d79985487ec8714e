"""Packages that not every installation has; asked for at the moment they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from headprune.extras import require


def need(module: str, extra: str, who: str) -> Any:
    """The imported module, or one sentence that begins with `who` needs it and says how to get it."""
    with require(extra, who):
        return importlib.import_module(module)


def parquet() -> Any:
    return need("pyarrow.parquet", "data", "Reading a parquet file needs")


def datasets() -> Any:
    return need("datasets", "data", "Data sets by name need")


def pillow() -> Any:
    return need("PIL.Image", "images", "Reading image files needs")
