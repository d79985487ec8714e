"""Files as users have them: missing, zipped, with paths too long for the system, in other encodings than UTF-8."""

from __future__ import annotations

import codecs
import gzip
import zlib
from pathlib import Path

from headprune.errors import DataError
from headprune.store import files

MARKS = (  # UTF-32 before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def is_there(place: str | Path) -> bool:
    return files.is_there(place, DataError)


def refuse_missing(path: Path) -> None:
    if not is_there(path):
        raise DataError(f"There is no file {path}; check the path.")
    if path.is_dir():
        raise DataError(f"{path} is a folder, not a file; name the file in it.")


def suffix_of(path: Path) -> str:
    """What kind of file it is, in small letters, whether it is zipped or not: data.CSV.gz is a .csv."""
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
        if any(data.startswith(mark) for mark, _ in MARKS):
            raise UnicodeError
        return data.decode("utf-8-sig")
    except UnicodeError as error:
        encoding = _guess(data)
        where = f" (byte {data[error.start]:#04x} at {error.start})" if isinstance(error, UnicodeDecodeError) else ""
        raise DataError(
            f"{path} cannot be read as {kind}: it is not UTF-8 text{where} but perhaps {encoding}; convert it with "
            f"iconv -f {encoding} -t UTF-8."
        ) from None


def _guess(data: bytes) -> str:
    for mark, name in MARKS:
        if data.startswith(mark):
            return name
    head = data[:4096]
    if head.count(0) > len(head) // 4:  # every other byte of Latin letters in UTF-16 is zero
        return "UTF-16LE" if head[1::2].count(0) > head[::2].count(0) else "UTF-16BE"
    # Bytes that Latin-1 has control characters at are curly quotes, dashes and the euro sign in Windows' own form.
    return "CP1252" if any(0x80 <= byte < 0xA0 for byte in data) else "LATIN1"
