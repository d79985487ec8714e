"""Reads tables: csv, tsv, jsonl, json and parquet files, compressed or not, or a data set by its name."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headprune.checkpoint.atomic_files import short
from headprune.data import packages
from headprune.data.files import is_there, read_text, refuse_missing, suffix_of
from headprune.data.locations import TABLES, looks_like_a_path
from headprune.errors import DataError

SEPARATORS = (",", ";", "\t", "|")
INTEGER = re.compile(r"[+-]?(0|[1-9]\d{0,17})")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)


BOOLEANS = {form: form.lower() == "true" for form in ("True", "true", "TRUE", "False", "false", "FALSE")}


class Table(dict[str, Sequence[Any]]):
    """Column name -> values. `typed`: the source distinguishes 1 from "1", which csv and tsv files do not."""

    def __init__(
        self,
        columns: Mapping[str, Sequence[Any]],
        *,
        typed: bool,
        folder: Path | None = None,
        class_names: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__(columns)
        self.typed = typed
        self.class_names = class_names or {}  # names of the classes in a column of numbers, where the data has them
        self.folder = folder  # file names in the table are relative to it

    @property
    def rows(self) -> int:
        return len(next(iter(self.values()), ()))


def read_table(source: str | Path, split: str | None = None) -> Table:
    """The columns of a file, or of a data set on the hub."""
    path = Path(source)
    suffix = suffix_of(path)
    if suffix not in TABLES:
        if is_there(path):
            raise DataError(f"{path} is not a table; the suffix must be one of {', '.join(TABLES)} or .txt.")
        return _read_dataset(str(source), split)
    refuse_missing(path)
    class_names: dict[str, Sequence[str]] = {}
    try:
        if suffix == ".parquet":
            columns, class_names = _parquet(path)
        elif suffix in (".csv", ".tsv"):
            columns = _parse_separated(read_text(path), "\t" if suffix == ".tsv" else ",")
        else:
            columns = _json(read_text(path), lines=suffix == ".jsonl")
    except DataError:
        raise
    except (ValueError, OSError, NotImplementedError, csv.Error) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read as {suffix[1:]}: {reason}; check the file.") from None
    if not any(len(values) for values in columns.values()):
        raise DataError(f"{path} has no rows; give a file with at least one.")
    return Table(columns, typed=suffix not in (".csv", ".tsv"), folder=path.parent, class_names=class_names)


def missing(value: Any) -> bool:
    """Whether a cell is empty: None, NaN, or only blanks."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return True
    return isinstance(value, float) and math.isnan(value)


def as_list(value: Any) -> list[Any] | None:
    """The list in a cell, also where it is written as JSON, as in csv files; None where it is no list."""
    if isinstance(value, str) and value.startswith('"[') and value.endswith(']"'):  # a tsv file with quotes
        value = value[1:-1].replace('""', '"')
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            try:
                value = json.loads(value.replace("'", '"'))  # the format of Python and pandas
            except ValueError:
                return None
    if hasattr(value, "tolist"):  # numpy
        value = value.tolist()
    return list(value) if isinstance(value, (list, tuple)) else None


# --- separated values ---


def _parse_separated(text: str, separator: str) -> dict[str, list[Any]]:
    if not text.strip():
        raise ValueError("it is empty")
    separator = _separator(text, separator)
    # Quotes in a tsv file are text: common data sets do not quote.
    quoting = csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL
    records = _records(text, separator, quoting)
    header, *rows = records
    names = _unique_names([name.strip() for name in header])
    for number, row in enumerate(rows):
        if len(row) > len(names):
            if any(row[len(names) :]):
                raise ValueError(f"row {number} has {len(row)} fields where the header has {len(names)}")
            del row[len(names) :]
        row.extend([None] * (len(names) - len(row)))  # type: ignore[list-item]
    return {name: _convert([row[index] for row in rows]) for index, name in enumerate(names)}


def _separator(text: str, default: str) -> str:
    """The default separator, unless the header has one column with it and several with another common one."""
    header = re.split(r"[\r\n]", text.lstrip("\r\n"), maxsplit=1)[0]

    def columns(separator: str) -> int:
        return len(next(csv.reader([header], delimiter=separator), ()))

    return default if columns(default) > 1 else max((default, *SEPARATORS), key=columns)


def _records(text: str, separator: str, quoting: int) -> list[list[str]]:
    with _long_fields():
        try:
            strict = csv.reader(io.StringIO(text, newline=""), delimiter=separator, quoting=quoting, strict=True)  # type: ignore[arg-type]
            return [row for row in strict if row]
        except csv.Error as error:
            if "unexpected end" in str(error):
                raise ValueError("a quote is opened and never closed") from None
        lenient = csv.reader(io.StringIO(text, newline=""), delimiter=separator, quoting=quoting)  # type: ignore[arg-type]
        return [row for row in lenient if row]


@contextlib.contextmanager
def _long_fields() -> Iterator[None]:
    """Raise the field limit of Python's csv reader, 128 KB by default: a document may be longer."""
    before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _unique_names(names: Sequence[str]) -> list[str]:
    counts: dict[str, int] = {}
    result = []
    for name in names:
        count = counts[name] = counts.get(name, -1) + 1
        result.append(f"{name}.{count}" if count else name)
    return result


def _convert(values: list[Any]) -> list[Any]:
    """The column as integers, floats or booleans where all values are, as text otherwise."""
    if not values or any(value is None for value in values):
        return values
    if all(INTEGER.fullmatch(value) for value in values):
        return [int(value) for value in values]
    if all(NUMBER.fullmatch(value) for value in values) and not any(_has_leading_zero(value) for value in values):
        return [float(value) for value in values]
    if all(value in BOOLEANS for value in values):
        return [BOOLEANS[value] for value in values]
    return values


def _has_leading_zero(value: str) -> bool:
    """Such as 007, which is text."""
    digits = value.lstrip("+-")
    return len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()


# --- json, parquet, data sets ---


def _json(text: str, *, lines: bool) -> dict[str, list[Any]]:
    """A list of objects, an object per line, or an object of columns (not with `lines`: then it is one row)."""
    if not text.strip():
        raise ValueError("it is empty")
    try:
        content = json.loads(text)
    except ValueError:
        parts = [line for line in text.split("\n") if line.strip()]
        if len(parts) < 2 or not parts[0].lstrip().startswith("{") or not parts[0].rstrip().endswith("}"):
            raise
        return _from_records([_line(line, number) for number, line in enumerate(parts)])
    if isinstance(content, list):
        return _from_records(content)
    if not isinstance(content, dict):
        raise ValueError("it holds neither a list nor an object")
    if lines:
        return _from_records([content])
    only = next(iter(content.values())) if len(content) == 1 else None
    if isinstance(only, list) and all(isinstance(row, dict) for row in only):  # {"data": [...]}
        return _from_records(only)
    columns = {name: list(values.values()) if isinstance(values, dict) else values for name, values in content.items()}
    if all(isinstance(values, list) for values in columns.values()):
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"its columns differ in length: {lengths}")
        return columns
    return _from_records([content])  # a single line


def _line(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"row {number} is not JSON ({error})") from None


def _from_records(records: list[Any]) -> dict[str, list[Any]]:
    if not all(isinstance(record, dict) for record in records):
        raise ValueError("its rows must be objects with the columns as names")
    names = dict.fromkeys(name for record in records for name in record)
    return {str(name): [record.get(name) for record in records] for name in names}


def _parquet(path: Path) -> tuple[dict[str, list[Any]], dict[str, Sequence[str]]]:
    """The columns, and the class names in the metadata of `datasets`."""
    table = packages.parquet().read_table(path)
    metadata = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    columns = {str(name): table.column(name).to_pylist() for name in table.column_names}
    return columns, _class_names(metadata.get("info", {}).get("features", {}))


def _class_names(features: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """The class names of each column, from the features of a data set; lists of classes have them one level down."""
    names: dict[str, Sequence[str]] = {}
    for column, feature in features.items():
        inner = feature.get("feature", feature) if isinstance(feature, dict) else {}
        if isinstance(inner, dict) and inner.get("_type") == "ClassLabel" and inner.get("names"):
            names[column] = [str(name) for name in inner["names"]]
    return names


def _read_dataset(name: str, split: str | None) -> Table:
    if looks_like_a_path(name):
        raise DataError(f"There is no file {name}; check the path.")
    datasets = packages.datasets()
    try:
        data = datasets.load_dataset(name, split=split or "train")
    except Exception as error:
        raise DataError(
            f"{short(name)} is neither a file here nor a data set that could be loaded from the hub "
            f"({type(error).__name__}); check the name, the split and the connection."
        ) from error
    # Images stay in the data set until they are opened.
    return Table(
        {column: _column(data, column) for column in data.column_names},
        typed=True,
        class_names=_class_names(data.features.to_dict()),
    )


def _column(data: Any, name: str) -> Sequence[Any]:
    is_image = type(data.features[name]).__name__ == "Image"
    return data[name] if is_image else list(data[name])
