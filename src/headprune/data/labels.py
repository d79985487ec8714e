"""Labels as the model counts them: classes by name or number, several at once, numbers to predict.

Whether a column holds names or numbers is decided for the column as a whole:

1. All values are names of the model's labels, and not all are numbers of labels: they are names.
2. All are numbers of labels (0 to one less than their count), and not all are names: they are numbers.
3. Both readings are possible and say the same: it does not matter.
4. Both are possible and differ (the labels are called "1", "2", "3" and the column holds 1 and 2): where the file tells
   1 from "1" (json, parquet, data sets, arrays), whole numbers are numbers and strings are names. A csv or tsv file
   does not; there, a column that has every number from 0 on has numbers, and any other one is refused.

Data sets that say what their numbers are called (`ClassLabel`) are read by these names, if the model has all of them:
its own numbers may be others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headprune.data.tables import Table, as_list, missing
from headprune.errors import DataError
from headprune.tasks import IGNORED

log = logging.getLogger(__name__)
SEPARATORS = (";", "|", ",")


def names_of(config: Any) -> dict[str, int]:
    """The model's label names, by its label2id, or its id2label where that does not have all of them."""
    names = {str(name): int(number) for name, number in (getattr(config, "label2id", None) or {}).items()}
    others = {str(name): int(number) for number, name in (getattr(config, "id2label", None) or {}).items()}
    return {**others, **names} if len(names) < len(others) else names


def labels_in(config: Any, table: Table, column: str) -> Sequence[Any]:
    """A column of labels; numbers that the data has names for are those names, if the model has them too."""
    values, called = table[column], table.called.get(column, ())
    if not called or not set(called) <= set(names_of(config)):
        return values

    def name(value: Any) -> Any:
        if isinstance(value, list):
            return [name(entry) for entry in value]
        return called[value] if isinstance(value, int) and 0 <= value < len(called) else value

    return [name(value) for value in values]


def classes(
    config: Any,
    values: Sequence[Any],
    column: str,
    *,
    typed: bool,
    rows: Sequence[int] | None = None,
    ignored: bool = False,
) -> list[int]:
    """The number of each label. `rows` says which row a value comes from, where rows have several; `ignored` allows
    -100, the label of what does not count."""
    rows = range(len(values)) if rows is None else rows
    known, count = names_of(config), int(config.num_labels)
    for row, value in zip(rows, values, strict=True):
        if missing(value):
            raise DataError(f"Row {row} of column {column!r} has no label; fill it in or remove the row.")
    by_name = [IGNORED if ignored and value == IGNORED else _name(value, known) for value in values]
    numbers = [whole(value) for value in values]
    by_number = [
        number if number is not None and (0 <= number < count or (ignored and number == IGNORED)) else None
        for number in numbers
    ]
    named, numbered = None not in by_name, None not in by_number
    if named and numbered and by_name != by_number:
        named = _named(values, by_number, column, count, typed)
    if named:
        return _in_range([number for number in by_name if number is not None], rows, column, count)
    if numbered:
        return [number for number in by_number if number is not None]
    raise _refusal(values, rows, column, by_name, by_number, numbers, list(known), count)


def _named(values: Sequence[Any], numbers: Sequence[int | None], column: str, count: int, typed: bool) -> bool:
    """Whether values that could be either are names."""
    if all(isinstance(value, bool) for value in values) or (typed and all(isinstance(value, str) for value in values)):
        return True
    if typed or set(numbers) - {IGNORED} == set(range(count)):
        log.warning(
            "Column %r holds numbers that are names of the model's labels as well; they are taken as numbers.", column
        )
        return False
    shown = ", ".join(str(value) for value in sorted({number for number in numbers if number is not None})[:5])
    raise DataError(
        f"Column {column!r} holds {shown}, which can be names of the model's labels or numbers of other ones; write it "
        'as jsonl, where "1" is a name and 1 a number.'
    )


def _name(value: Any, known: Mapping[str, int]) -> int | None:
    if isinstance(value, bool):
        text = str(value)
        return next((known[form] for form in (text, text.lower(), text.upper()) if form in known), None)
    if isinstance(value, float) and value.is_integer():
        return known.get(str(value), known.get(str(int(value))))
    return known.get(str(value))


def whole(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return None if isinstance(value, float) and value != number else number


def _in_range(numbers: list[int], rows: Sequence[int], column: str, count: int) -> list[int]:
    for row, number in zip(rows, numbers, strict=True):
        if not 0 <= number < count and number != IGNORED:
            raise _out_of_range(number, row, column, count)
    return numbers


def _out_of_range(number: int, row: int, column: str, count: int) -> DataError:
    return DataError(
        f"Label {number} in row {row} of column {column!r} is out of range: the model has {count} labels, numbered 0 "
        f"to {count - 1}."
    )


def _refusal(
    values: Sequence[Any],
    rows: Sequence[int],
    column: str,
    by_name: Sequence[int | None],
    by_number: Sequence[int | None],
    numbers: Sequence[int | None],
    known: Sequence[str],
    count: int,
) -> DataError:
    """The first value that is no label at all; if each is one in its own way, two that do not go together."""
    for place, value in enumerate(values):
        if by_name[place] is None and by_number[place] is None:
            number = numbers[place]
            if number is not None:
                return _out_of_range(number, rows[place], column, count)
            some = ", ".join(known[:5])
            return DataError(
                f"Label {value!r} in row {rows[place]} of column {column!r} is none of the model's labels ({some}, "
                "...); correct it, or name another column with --label-column."
            )
    name = next(place for place, number in enumerate(by_number) if number is None)
    number = next(place for place, found in enumerate(by_name) if found is None)
    return DataError(
        f"Column {column!r} has the name {values[name]!r} in row {rows[name]} and the number {values[number]!r} in row "
        f"{rows[number]}; use names or numbers throughout."
    )


def flattened(lists: Sequence[Sequence[Any]]) -> tuple[list[Any], list[int]]:
    """All entries, and the row that each comes from."""
    pairs = [(value, row) for row, values in enumerate(lists) for value in values]
    return [value for value, _ in pairs], [row for _, row in pairs]


def regrouped(values: Sequence[Any], lists: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """The reverse: entries in lists as long as those they come from."""
    start, result = 0, []
    for original in lists:
        result.append(list(values[start : start + len(original)]))
        start += len(original)
    return result


def several_classes(config: Any, values: Sequence[Any], column: str, *, typed: bool) -> list[torch.Tensor]:
    """Rows of 0 and 1, one per label of the model, from lists of labels, from such flags, or from a;b, a|b or a,b."""
    count, known = int(config.num_labels), names_of(config)
    lists = []
    for row, value in enumerate(values):
        entries = as_list(value)
        if entries is None and isinstance(value, float) and math.isnan(value):
            raise DataError(f"Row {row} of column {column!r} has no labels; write an empty list for none.")
        lists.append(entries if entries is not None else _parted(value, known))
    flags = all(len(entries) == count and all(_is_flag(entry) for entry in entries) for entries in lists)
    if flags:
        return [torch.tensor([float(entry) for entry in entries]) for entries in lists]
    flat, rows = flattened(lists)
    numbers = regrouped(classes(config, flat, column, typed=typed, rows=rows), lists)
    result = []
    for chosen in numbers:
        target = torch.zeros(count)
        target[chosen] = 1.0
        result.append(target)
    return result


def _parted(value: Any, known: Mapping[str, int]) -> list[Any]:
    """The labels that a cell of text names; a name with a comma in it is one name."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return []
    if not isinstance(value, str) or value in known:
        return [value]
    # The first separator that is there: a name may have a comma in it.
    separator = next((mark for mark in SEPARATORS if mark in value), ";")
    return [part.strip() for part in value.split(separator) if part.strip()]


def _is_flag(entry: Any) -> bool:
    return isinstance(entry, (bool, int, float)) and entry in (0, 1)


def numbers(config: Any, values: Sequence[Any], column: str) -> list[torch.Tensor]:
    """What a regression model should say: a number per row, or a list of them where it says several."""
    count = int(config.num_labels)
    result = []
    for row, value in enumerate(values):
        if missing(value):
            raise DataError(f"Row {row} of column {column!r} has no number; fill it in or remove the row.")
        entries = as_list(value)
        try:
            found = [float(entry) for entry in (entries if entries is not None else [value])]
        except (TypeError, ValueError):
            found = [math.nan]
        if not all(map(math.isfinite, found)):
            raise DataError(f"Column {column!r} must hold numbers for a regression model, but row {row} has {value!r}.")
        if len(found) != count:
            raise DataError(
                f"Row {row} of column {column!r} has {len(found)} numbers where the model says {count}; give as many."
            )
        result.append(torch.tensor(found if count > 1 else found[0]))
    return result
