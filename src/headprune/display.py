"""How results show themselves: counts in sentences, a pandas frame, and a small html table in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headprune.extras import require


def counted(count: float, noun: str) -> str:
    """A count with its noun, which is plural unless the count is 1: "1 epoch", "2 epochs", "3 batches"."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun if count == 1 else plural(noun)}"


def plural(noun: str) -> str:
    return f"{noun}es" if noun.endswith(("s", "x", "tch", "sh")) else f"{noun}s"


def data_frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A pandas frame with a line per row and a column per key."""
    with require("data", "Data frames need"):
        import pandas
    return pandas.DataFrame(list(rows))


def html_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """An HTML table without style sheets or scripts: the first cell of a row is its name, the others are aligned to the
    right. Notes are sentences below it."""

    def cells(values: Sequence[str], tag: str) -> str:
        left, right = f"<{tag} style='text-align:left'>", f"<{tag} style='text-align:right'>"
        return "".join(f"{right if column else left}{html.escape(v)}</{tag}>" for column, v in enumerate(values))

    head = f"<thead><tr>{cells(headings, 'th')}</tr></thead>"
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    below = "".join(f"<div>{html.escape(note)}</div>" for note in notes)
    caption = f"<caption style='text-align:left'>{html.escape(title)}</caption>"
    return f"<div><table>{caption}{head}<tbody>{body}</tbody></table>{below}</div>"
