"""What is in the pictures that figures are saved as: their sizes, and the texts and labels of an svg."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"
SCALE = 2  # pixels of a png for a pixel of the svg


class Drawing:
    """A picture of vectors: its size, its texts as they stand, and the labels of its marks for screen readers."""

    def __init__(self, text: str) -> None:
        root = ElementTree.fromstring(text)
        self.size = float(root.attrib["width"]), float(root.attrib["height"])
        self.texts = ["".join(line.itertext()) for line in root.iter(f"{SVG}text")]
        self.labels = [mark.attrib["aria-label"] for mark in root.iter() if "aria-label" in mark.attrib]


def png_size(content: bytes) -> tuple[int, int]:
    """The size of a picture of pixels, which is whole and not of one colour."""
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height, depth, colours = struct.unpack(">IIBB", content[16:26])
    assert (depth, colours) == (8, 6)  # red, green, blue and opacity
    data, place = b"", 8
    while place < len(content):
        size, kind = struct.unpack(">I4s", content[place : place + 8])
        part = content[place + 8 : place + 8 + size]
        assert struct.unpack(">I", content[place + 8 + size : place + 12 + size])[0] == zlib.crc32(kind + part)
        data += part if kind == b"IDAT" else b""
        place += 12 + size
    rows = zlib.decompress(data)
    assert len(rows) == height * (1 + 4 * width)
    assert len(set(rows)) > 8
    return width, height


def pdf_size(content: bytes) -> tuple[float, float]:
    """The size of a document of one page."""
    assert content.startswith(b"%PDF")
    ((width, height),) = re.findall(rb"/MediaBox ?\[0 0 ([\d.]+) ([\d.]+)\]", content)
    return float(width), float(height)


def drawing(folder: Path, name: str) -> Drawing:
    """A figure that is saved in three forms, which have one size."""
    shown = Drawing((folder / f"{name}.svg").read_text())
    assert pdf_size((folder / f"{name}.pdf").read_bytes()) == shown.size
    size = png_size((folder / f"{name}.png").read_bytes())
    assert all(abs(pixels - SCALE * length) <= 1 for pixels, length in zip(size, shown.size, strict=True))
    return shown
