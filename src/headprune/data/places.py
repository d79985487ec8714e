"""Where data can be; known without reading it, and without what reads it."""

from __future__ import annotations

from pathlib import Path

from headprune.data.files import is_there, refuse_missing, suffix_of
from headprune.store.places import looks_like_a_path

__all__ = ["TABLES", "looks_like_a_path", "refuse_missing_data"]

TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")


def refuse_missing_data(source: str) -> None:
    """Refuse what names a file that is not there; what may be a data set of the hub passes."""
    path = Path(source)
    named = suffix_of(path) in (*TABLES, ".txt", ".npz") or looks_like_a_path(source)
    if named and not (is_there(path) and path.is_dir()):  # a folder may hold images
        refuse_missing(path)
