"""Converts labels to targets of the model: classes by name or number, several classes at once, regression targets.

Whether a column holds names or numbers is decided for the column as a whole:

1. All values are names of the model's labels, and not all are numbers of labels: they are names.
2. All are numbers of labels (0 to one less than their count), and not all are names: they are numbers.
3. Both readings are possible and give the same classes: either is used.
4. Both are possible and differ (the labels are "1", "2", "3" and the column holds 1 and 2): where the file
   distinguishes 1 from "1" (json, parquet, data sets, arrays), integers are numbers and strings are names. A csv or
   tsv file does not; there, a column that has every number from 0 on has numbers, and any other one is refused.

Data sets with names for their numbers (`ClassLabel`) are read by these names, if the model has all of them: the model
may number them differently.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headprune.data.tables import Table, as_list, missing
from headprune.display import counted
from headprune.errors import DataError
from headprune.tasks import IGNORED

log = logging.getLogger(__name__)
SEPARATORS = (";", "|", ",")


def ids_by_name(config: Any) -> dict[str, int]:
    """The ids of the model's labels by name, from label2id, completed from id2label where that has more."""
    from_label2id = {str(name): int(number) for name, number in (getattr(config, "label2id", None) or {}).items()}
    from_id2label = {str(name): int(number) for number, name in (getattr(config, "id2label", None) or {}).items()}
    return {**from_id2label, **from_label2id} if len(from_label2id) < len(from_id2label) else from_label2id


def labels_in(config: Any, table: Table, column: str) -> Sequence[Any]:
    """A column of labels; numbers are replaced by the class names of the data, if the model has all of these."""
    values, class_names = table[column], table.class_names.get(column, ())
    if not class_names or not set(class_names) <= set(ids_by_name(config)):
        return values

    def to_name(value: Any) -> Any:
        if isinstance(value, list):
            return [to_name(entry) for entry in value]
        return class_names[value] if isinstance(value, int) and 0 <= value < len(class_names) else value

    return [to_name(value) for value in values]


def class_ids(
    config: Any,
    values: Sequence[Any],
    column: str,
    *,
    typed: bool,
    rows: Sequence[int] | None = None,
    ignored: bool = False,
) -> list[int]:
    """The class id of each value. `rows` are the row numbers of the values, where rows have several; `ignored` allows
    -100, the label of ignored tokens."""
    rows = range(len(values)) if rows is None else rows
    label_ids, count = ids_by_name(config), int(config.num_labels)
    for row, value in zip(rows, values, strict=True):
        if missing(value):
            raise DataError(f"Row {row} of column {column!r} has no label; fill it in or remove the row.")
    by_name = [IGNORED if ignored and value == IGNORED else _id_of_name(value, label_ids) for value in values]
    numbers = [as_integer(value) for value in values]
    by_number = [
        number if number is not None and (0 <= number < count or (ignored and number == IGNORED)) else None
        for number in numbers
    ]
    are_names, are_numbers = None not in by_name, None not in by_number
    if are_names and are_numbers and by_name != by_number:
        are_names = _are_names(values, by_number, column, count, typed)
    if are_names:
        return _check_range([number for number in by_name if number is not None], rows, column, count)
    if are_numbers:
        return [number for number in by_number if number is not None]
    raise _label_error(values, rows, column, by_name, by_number, numbers, list(label_ids), count)


def _are_names(values: Sequence[Any], numbers: Sequence[int | None], column: str, count: int, typed: bool) -> bool:
    """Whether values that could be names or numbers are names."""
    if all(isinstance(value, bool) for value in values) or (typed and all(isinstance(value, str) for value in values)):
        return True
    if typed or set(numbers) - {IGNORED} == set(range(count)):
        log.warning(
            "Column %r holds numbers that are names of the model's labels as well; they are read as numbers.", column
        )
        return False
    shown = ", ".join(str(value) for value in sorted({number for number in numbers if number is not None})[:5])
    raise DataError(
        f"Column {column!r} holds {shown}, which can be names of the model's labels or numbers of other ones; store it "
        'as jsonl, where "1" is a name and 1 a number.'
    )


def _id_of_name(value: Any, label_ids: Mapping[str, int]) -> int | None:
    if isinstance(value, bool):
        text = str(value)
        return next((label_ids[form] for form in (text, text.lower(), text.upper()) if form in label_ids), None)
    if isinstance(value, float) and value.is_integer():
        return label_ids.get(str(value), label_ids.get(str(int(value))))
    return label_ids.get(str(value))


def as_integer(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if isinstance(value, float) and value != number else number


def _check_range(numbers: list[int], rows: Sequence[int], column: str, count: int) -> list[int]:
    for row, number in zip(rows, numbers, strict=True):
        if not 0 <= number < count and number != IGNORED:
            raise _range_error(number, row, column, count)
    return numbers


def _range_error(number: int, row: int, column: str, count: int) -> DataError:
    return DataError(
        f"Label {number} in row {row} of column {column!r} is out of range: the model has "
        f"{counted(count, 'label')}, numbered 0 to {count - 1}."
    )


def _label_error(
    values: Sequence[Any],
    rows: Sequence[int],
    column: str,
    by_name: Sequence[int | None],
    by_number: Sequence[int | None],
    numbers: Sequence[int | None],
    names: Sequence[str],
    count: int,
) -> DataError:
    """The error for the first value that is no label; where each is one, for a name and a number in one column."""
    for index, value in enumerate(values):
        if by_name[index] is None and by_number[index] is None:
            number = numbers[index]
            if number is not None:
                return _range_error(number, rows[index], column, count)
            some = ", ".join(names[:5])
            return DataError(
                f"Label {value!r} in row {rows[index]} of column {column!r} is none of the model's labels ({some}, "
                "...); correct it, or name another column with --label-column."
            )
    name = next(index for index, number in enumerate(by_number) if number is None)
    number = next(index for index, label_id in enumerate(by_name) if label_id is None)
    return DataError(
        f"Column {column!r} has the name {values[name]!r} in row {rows[name]} and the number {values[number]!r} in row "
        f"{rows[number]}; use names or numbers throughout."
    )


def flatten(lists: Sequence[Sequence[Any]]) -> tuple[list[Any], list[int]]:
    """All entries, and the row number of each."""
    pairs = [(value, row) for row, values in enumerate(lists) for value in values]
    return [value for value, _ in pairs], [row for _, row in pairs]


def regroup(values: Sequence[Any], lists: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The inverse of `flatten`: entries in lists of the original lengths."""
    start, result = 0, []
    for original in lists:
        result.append(list(values[start : start + len(original)]))
        start += len(original)
    return result


def multi_hot_targets(config: Any, values: Sequence[Any], column: str, *, typed: bool) -> list[torch.Tensor]:
    """Multi-hot targets, from lists of labels, from lists of 0 and 1, or from text such as a;b, a|b or a,b."""
    count, label_ids = int(config.num_labels), ids_by_name(config)
    lists = []
    for row, value in enumerate(values):
        entries = as_list(value)
        if entries is None and isinstance(value, float) and math.isnan(value):
            raise DataError(f"Row {row} of column {column!r} has no labels; write an empty list for none.")
        lists.append(entries if entries is not None else _split_labels(value, label_ids))
    flags = all(len(entries) == count and all(_is_flag(entry) for entry in entries) for entries in lists)
    if flags:
        return [torch.tensor([float(entry) for entry in entries]) for entries in lists]
    flat, rows = flatten(lists)
    numbers = regroup(class_ids(config, flat, column, typed=typed, rows=rows), lists)
    result = []
    for indices in numbers:
        target = torch.zeros(count)
        target[indices] = 1.0
        result.append(target)
    return result


def _split_labels(value: Any, label_ids: Mapping[str, int]) -> list[Any]:
    """The labels in a cell of text; a label name that contains a comma is one label."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    if not isinstance(value, str) or value in label_ids:
        return [value]
    # The first separator that occurs, the comma last: a name may contain a comma.
    separator = next((mark for mark in SEPARATORS if mark in value), ";")
    return [part.strip() for part in value.split(separator) if part.strip()]


def _is_flag(entry: Any) -> bool:
    return isinstance(entry, (bool, int, float)) and entry in (0, 1)


def regression_targets(config: Any, cells: Sequence[Any], column: str) -> list[torch.Tensor]:
    """The targets of a regression model: a number per row, or a list where it has several outputs."""
    count = int(config.num_labels)
    result = []
    for row, cell in enumerate(cells):
        if missing(cell):
            raise DataError(f"Row {row} of column {column!r} has no number; fill it in or remove the row.")
        entries = as_list(cell)
        try:
            values = [float(entry) for entry in (entries if entries is not None else [cell])]
        except (TypeError, ValueError):
            values = [math.nan]
        if not all(map(math.isfinite, values)):
            raise DataError(f"Column {column!r} must hold numbers for a regression model, but row {row} has {cell!r}.")
        if len(values) != count:
            raise DataError(
                f"Row {row} of column {column!r} has {len(values)} numbers, but the model predicts {count}; "
                f"give {count}."
            )
        result.append(torch.tensor(values if count > 1 else values[0]))
    return result
