"""Checks of data paths, without importing the packages that read the data."""

from __future__ import annotations

from pathlib import Path

from headprune.checkpoint.paths import looks_like_a_path
from headprune.data.files import is_there, refuse_missing, suffix_of

__all__ = ["TABLES", "looks_like_a_path", "refuse_missing_data"]

TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")


def refuse_missing_data(source: str) -> None:
    """Raise for the path of a missing file; a name that may be a data set on the hub passes."""
    path = Path(source)
    is_file = suffix_of(path) in (*TABLES, ".txt", ".npz") or looks_like_a_path(source)
    if is_file and not (is_there(path) and path.is_dir()):  # a folder may hold images
        refuse_missing(path)
