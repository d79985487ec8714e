"""Writes figures as png, svg and pdf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headprune.checkpoint.atomic_files import write_bytes, write_text
from headprune.extras import require

with require("report", "Figures need"):
    import vl_convert

FORMATS = ("png", "svg", "pdf")
SCALE = 2.0  # of png pixels, for print and high-resolution screens


def png(chart: Any) -> bytes:
    """An Altair chart as a picture."""
    return bytes(vl_convert.vegalite_to_png(chart.to_json(), scale=SCALE))


def save_figure(chart: Any, folder: Path, name: str) -> list[Path]:
    """Write an Altair chart as folder/name.{png,svg,pdf}; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    specification = chart.to_json()
    files = [folder / f"{name}.{form}" for form in FORMATS]
    write_bytes(files[0], vl_convert.vegalite_to_png(specification, scale=SCALE))
    write_text(files[1], vl_convert.vegalite_to_svg(specification))
    write_bytes(files[2], vl_convert.vegalite_to_pdf(specification))
    return files
