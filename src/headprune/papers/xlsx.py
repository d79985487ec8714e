"""Just enough of the xlsx format to read a sheet of numbers: it is a zip of xml files, and no package is needed."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from xml.etree import ElementTree

from headprune.papers.paper import ReproductionError

SPACE = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
SHEET, STRINGS = "xl/worksheets/sheet1.xml", "xl/sharedStrings.xml"
LARGEST = 64 * 2**20  # bytes when unpacked: a small archive must not fill the memory

Value = float | str | None


def read_sheet(path: Path) -> list[list[Value]]:
    """The rows of the first sheet; cells that are not in the file are None."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
            if any(archive.getinfo(name).file_size > LARGEST for name in names & {SHEET, STRINGS}):
                raise ReproductionError(f"{path} is too large for a sheet of results; give the authors' own file.")
            strings = _strings(archive.read(STRINGS)) if STRINGS in names else []
            sheet = ElementTree.fromstring(archive.read(SHEET))
        return [_row(row, strings) for row in sheet.iter(f"{SPACE}row")]
    except (zipfile.BadZipFile, KeyError, ElementTree.ParseError, ValueError, IndexError) as error:
        raise ReproductionError(f"{path} cannot be read as xlsx ({type(error).__name__}); fetch it again.") from None


def _strings(xml: bytes) -> list[str]:
    return [_text(item) for item in ElementTree.fromstring(xml).iter(f"{SPACE}si")]


def _text(element: ElementTree.Element) -> str:
    return "".join(part.text or "" for part in element.iter(f"{SPACE}t"))


def _row(row: ElementTree.Element, strings: list[str]) -> list[Value]:
    values: list[Value] = []
    for cell in row.iter(f"{SPACE}c"):
        place = _column(cell.get("r", ""), len(values))
        values += [None] * (place - len(values))
        values.append(_value(cell, strings))
    return values


def _column(reference: str, default: int) -> int:
    """A1 is in column 0, AA1 in column 26; a cell without a reference follows the one before."""
    letters = re.match("[A-Z]+", reference)
    if letters is None:
        return default
    number = 0
    for letter in letters[0]:
        number = number * 26 + ord(letter) - ord("A") + 1
    return number - 1


def _value(cell: ElementTree.Element, strings: list[str]) -> Value:
    kind = cell.get("t", "n")
    if kind == "inlineStr":
        return _text(cell)
    content = cell.findtext(f"{SPACE}v")
    if content is None:
        return None
    if kind == "s":
        return strings[int(content)]
    return float(content) if kind == "n" else content
