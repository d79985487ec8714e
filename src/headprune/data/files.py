"""Reads text files and explains failures: missing files, paths too long for the system, other encodings than UTF-8."""

from __future__ import annotations

import codecs
import gzip
import zlib
from pathlib import Path

from headprune.checkpoint import atomic_files
from headprune.errors import DataError

BYTE_ORDER_MARKS = (  # UTF-32 before UTF-16, because its mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def is_there(path: str | Path) -> bool:
    return atomic_files.path_exists(path, DataError)


def refuse_missing(path: Path) -> None:
    if not is_there(path):
        raise DataError(f"There is no file {path}; check the path.")
    if path.is_dir():
        raise DataError(f"{path} is a folder, not a file; name the file in it.")


def suffix_of(path: Path) -> str:
    """The suffix in lower case, without .gz: data.CSV.gz is a .csv."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, with or without a byte order mark, unzipped where it ends with .gz."""
    refuse_missing(path)
    kind = suffix_of(path)[1:]
    try:
        data = path.read_bytes()
        if path.suffix.lower() == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read as {kind}: {error}; check the file.") from None
    try:
        if any(data.startswith(mark) for mark, _ in BYTE_ORDER_MARKS):
            raise UnicodeError
        return data.decode("utf-8-sig")
    except UnicodeError as error:
        encoding = _guess_encoding(data)
        where = f" (byte {data[error.start]:#04x} at {error.start})" if isinstance(error, UnicodeDecodeError) else ""
        raise DataError(
            f"{path} cannot be read as {kind}: it is not UTF-8 text{where} but perhaps {encoding}; convert it with "
            f"iconv -f {encoding} -t UTF-8."
        ) from None


def _guess_encoding(data: bytes) -> str:
    for mark, name in BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return name
    start = data[:4096]
    if start.count(0) > len(start) // 4:  # every other byte of Latin letters in UTF-16 is zero
        return "UTF-16LE" if start[1::2].count(0) > start[::2].count(0) else "UTF-16BE"
    # Control characters of Latin-1 are curly quotes, dashes and the euro sign in CP1252.
    return "CP1252" if any(0x80 <= byte < 0xA0 for byte in data) else "LATIN1"
