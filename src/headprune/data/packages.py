"""Packages that not every installation has; asked for at the moment they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from headprune.errors import HeadpruneError


def need(module: str, extra: str, what: str) -> Any:
    """The imported module, or one sentence that says what needs it and how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = {"PIL": "Pillow"}.get(module.partition(".")[0], module.partition(".")[0])
        raise HeadpruneError(f"{what} needs {package}; install it with pip install 'headprune[{extra}]'.") from None


def parquet() -> Any:
    return need("pyarrow.parquet", "data", "Reading a parquet file")


def datasets() -> Any:
    return need("datasets", "data", "Loading a data set by its name")


def pillow() -> Any:
    return need("PIL.Image", "images", "Reading image files")
