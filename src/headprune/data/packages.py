"""Optional packages, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from headprune.extras import require


def need(module: str, extra: str, who: str) -> Any:
    """The imported module; raises with a sentence that begins with `who` and names the extra to install."""
    with require(extra, who):
        return importlib.import_module(module)


def parquet() -> Any:
    return need("pyarrow.parquet", "data", "Reading a parquet file needs")


def datasets() -> Any:
    return need("datasets", "data", "Data sets by name need")


def pillow() -> Any:
    return need("PIL.Image", "images", "Reading image files needs")
