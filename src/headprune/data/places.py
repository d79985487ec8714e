"""Where data can be; known without reading it, and without what reads it."""

from __future__ import annotations

from pathlib import Path

from headprune.errors import DataError

TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")


def refuse_missing(path: Path) -> None:
    if not path.exists():
        raise DataError(f"There is no file {path}; check the path.")


def refuse_missing_data(source: str) -> None:
    """Refuse what names a file that is not there; what may be a data set of the hub passes."""
    if Path(source).suffix in (*TABLES, ".txt", ".npz") or looks_like_a_path(source):
        refuse_missing(Path(source))


def looks_like_a_path(name: str) -> bool:
    return name.count("/") > 1 or name.startswith((".", "/", "~"))
