"""The style of tables, which fit a terminal of 80 columns."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD

LEAN: dict[str, Any] = {"box": SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0)}
