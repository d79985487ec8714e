"""Tables of pages that are made from committed results of reproductions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headprune.papers.page_tables import BLOCK, with_tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if BLOCK.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_pages_have_the_tables_of_the_results(page: Path) -> None:
    """`python -m headprune.papers.page_tables docs` updates them."""
    text = page.read_text(encoding="utf-8")
    assert with_tables(text, ROOT) == text


def test_a_table_changes_with_its_results(tmp_path: Path) -> None:
    file = "benchmarks/results/claims/gates-encoder-decoder.json"
    results = json.loads((ROOT / file).read_text())
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(json.dumps(results))
    page = f"before\n<!-- table1 of {file} -->\nold\n<!-- end -->\nafter\n"
    made = with_tables(page, tmp_path)
    assert made.startswith("before\n")
    assert made.endswith("<!-- end -->\nafter\n")
    assert "old" not in made
    (row,) = (line for line in made.splitlines() if line.startswith("| gates keep=0.25 |"))
    exact = next(row for row in results["rows"] if row["name"] == "gates keep=0.25")["exact"]
    exact["mean"], exact["deviation"] = 12.34, 5.67
    (tmp_path / file).write_text(json.dumps(results))
    again = with_tables(made, tmp_path)
    assert again != made
    assert row not in again
    assert "| 12.3 ± 5.7 |" in again
