"""Reading data: tables (csv, tsv, jsonl, parquet, or a data set's name), plain text, images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headprune.data import images, texts
from headprune.data.batches import Examples
from headprune.data.places import TABLES, looks_like_a_path, refuse_missing
from headprune.errors import DataError
from headprune.extras import needed

TEXT_NAMES = ("text", "sentence", "sentence1", "premise", "question")
LABEL_NAMES = ("label", "labels", "target")


@dataclass(frozen=True)
class Columns:
    """Which columns hold what; None means: find it by its usual name."""

    text: str | None = None
    pair: str | None = None
    label: str | None = None


def load_examples(
    model: PreTrainedModel,
    source: str | Path,
    *,
    processor: str | Path,
    columns: Columns | None = None,
    split: str | None = None,
    max_length: int = 128,
    seed: int = 0,
) -> Examples:
    """The examples in a file, folder or data set, as this model takes them.

    `processor` is where the tokenizer or image processor is, usually the model's own folder or hub name.
    """
    columns = columns or Columns()
    place = Path(source)
    if images.is_image_model(model):
        examples = images.load(model, place, processor=processor, split=split)
    elif place.suffix == ".txt":
        examples = texts.from_plain_text(model, _read_text(place), processor, max_length, seed)
    else:
        table = read_table(source, split)
        names = _find_columns(table, columns)
        examples = texts.from_table(model, table, names, processor, max_length, seed)
    if not len(examples):
        raise DataError(f"{source} has no examples; give a file with at least one row.")
    return examples


def _read_text(path: Path) -> str:
    refuse_missing(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text; convert it first.") from None
    if not text.strip():
        raise DataError(f"{path} is empty; give a file with some text.")
    return text


def read_table(source: str | Path, split: str | None = None) -> dict[str, list[Any]]:
    """Column name -> values, from a csv, tsv, jsonl or parquet file or from a data set on the hub."""
    with needed("data", "Reading tables needs"):
        import pandas
    path = Path(source)
    if path.suffix not in TABLES:
        if path.exists():
            raise DataError(f"{path} is not a table; the suffix must be one of {', '.join(TABLES)} or .txt.")
        return _read_dataset(str(source), split)
    refuse_missing(path)
    try:
        if path.suffix == ".tsv":
            frame = pandas.read_csv(path, sep="\t", quoting=3, keep_default_na=False)
        elif path.suffix == ".csv":
            frame = pandas.read_csv(path, keep_default_na=False)
        elif path.suffix == ".parquet":
            frame = pandas.read_parquet(path)
        else:
            frame = pandas.read_json(path, lines=path.suffix == ".jsonl")
    except (ValueError, OSError, pandas.errors.ParserError, pandas.errors.EmptyDataError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read as {path.suffix[1:]}: {reason}; check the file.") from None
    if not len(frame):
        raise DataError(f"{path} has no rows; give a file with at least one.")
    return {str(name): frame[name].tolist() for name in frame.columns}


def _read_dataset(name: str, split: str | None) -> dict[str, list[Any]]:
    if looks_like_a_path(name):
        refuse_missing(Path(name))
    with needed("data", "Data sets by name need"):
        import datasets
    try:
        data = datasets.load_dataset(name, split=split or "train")
    except Exception as error:
        raise DataError(
            f"{name} is neither a file here nor a data set that could be loaded from the hub ({type(error).__name__}); "
            "check the name, the split and the connection."
        ) from error
    return {column: list(data[column]) for column in data.column_names}


def _find_columns(table: Mapping[str, Sequence[Any]], asked: Columns) -> Columns:
    for what, name in (("text", asked.text), ("pair", asked.pair), ("label", asked.label)):
        if name is not None and name not in table:
            raise DataError(f"There is no {what} column {name!r}; the data has {', '.join(map(repr, table))}.")
    text = asked.text or next((name for name in TEXT_NAMES if name in table), None)
    if text is None:
        raise DataError(f"No text column was found; name it with --text-column: {', '.join(map(repr, table))}.")
    label = asked.label or next((name for name in LABEL_NAMES if name in table), None)
    return Columns(text, asked.pair, label)
