"""Packages that not every installation has; asked for at the moment they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from headprune.extras import needed


def need(module: str, extra: str, what: str) -> Any:
    """The imported module, or one sentence that says what needs it and how to get it."""
    with needed(extra, f"{what} needs"):
        return importlib.import_module(module)


def parquet() -> Any:
    return need("pyarrow.parquet", "data", "Reading a parquet file")


def datasets() -> Any:
    return need("datasets", "data", "Loading a data set by its name")


def pillow() -> Any:
    return need("PIL.Image", "images", "Reading image files")
