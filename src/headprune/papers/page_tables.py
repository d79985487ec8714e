"""Tables of the documentation that are made from committed results of reproductions.

`python -m headprune.papers.page_tables docs` updates them. Each is between two comments, `<!-- table1 of FILE -->` and
`<!-- end -->`; FILE is relative to the folder above the pages.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headprune.papers.tables import Table

BLOCK = re.compile(r"(<!-- (table\d) of (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def tables_in(file: Path) -> dict[str, Table]:
    """The tables of a file of results, by name."""
    results = json.loads(file.read_text(encoding="utf-8"))
    return {table.name: table for table in _makers(results)}


def _makers(results: Mapping[str, Any]) -> Sequence[Table]:
    from headprune.papers import translation_gates

    if results["paper"] == translation_gates.PAPER:
        return translation_gates.tables_of(results)
    from headprune.papers.all_attention.outcome import tables_of

    return tables_of(results)


def with_tables(page: str, root: Path) -> str:
    """A page with its tables updated: each with its title, and with the sentences of its note that none before it
    has."""
    written: dict[str, None] = {}

    def table(block: re.Match[str]) -> str:
        made = tables_in(root / block[3])[block[2]]
        sentences = [each for each in re.split(r"(?<=\.) ", made.note) if each not in written]
        written.update(dict.fromkeys(sentences))
        note = " ".join(sentences)
        return f"{block[1]}\n{made.title}\n\n{made.rows_as_markdown()}\n\n{note}\n\n{block[4]}"

    return BLOCK.sub(table, page)


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        made = with_tables(text, Path(sys.argv[1]).resolve().parent)
        if made != text:
            path.write_text(made, encoding="utf-8")
