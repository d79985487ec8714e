"""CITATION.cff has the form of version 1.2.0, and the BibTeX of the page is the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import headprune
from headprune.papers.ledger import PAPERS

ROOT = Path(__file__).resolve().parents[2]
ENTRY = re.compile(r"^@(?P<type>\w+)\{(?P<key>\w+),\n(?P<fields>.*?)^\}", re.MULTILINE | re.DOTALL)
FIELD = re.compile(r"^  (\w+) = \{(.*)\},?$", re.MULTILINE)
# Keys of the schema of version 1.2.0, as far as they are used, and those that it requires.
KEYS = {
    "cff-version",
    "message",
    "type",
    "title",
    "abstract",
    "authors",
    "version",
    "license",
    "keywords",
    "references",
}
REQUIRED = {"cff-version", "message", "title", "authors"}
REFERENCE_KEYS = {"type", "title", "authors", "year", "url", "identifiers"}
PERSON, ENTITY = {"family-names", "given-names"}, {"name"}


@pytest.fixture(scope="module")
def citation() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def entries() -> dict[str, dict[str, str]]:
    page = (ROOT / "docs" / "citing.md").read_text(encoding="utf-8")
    return {match["key"]: dict(FIELD.findall(match["fields"])) for match in ENTRY.finditer(page)}


def test_form(citation: dict[str, Any]) -> None:
    assert REQUIRED <= set(citation) <= KEYS
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert citation["version"] == headprune.__version__
    assert all(set(author) in (PERSON, ENTITY) for author in citation["authors"])
    for reference in citation["references"]:
        assert set(reference) == REFERENCE_KEYS
        assert all(set(author) == PERSON for author in reference["authors"])
        assert isinstance(reference["year"], int)
        assert reference["url"].startswith("https://")
        assert all(set(identifier) == {"type", "value"} for identifier in reference["identifiers"])


def test_the_papers_of_the_ledger_are_the_references(citation: dict[str, Any]) -> None:
    identifiers = [reference["identifiers"][0]["value"] for reference in citation["references"]]
    named = [re.search(r"arXiv (\S+)", title) for title in PAPERS.values()]
    assert identifiers == [f"arXiv:{found[1]}" for found in named if found is not None]
    assert len(identifiers) == 3


def test_bibtex_is_the_same(citation: dict[str, Any]) -> None:
    software, *papers = entries().values()
    assert software["title"] == citation["title"]
    assert software["author"] == "{" + citation["authors"][0]["name"] + "}"
    assert software["version"] == citation["version"]
    assert software["license"] == citation["license"]
    assert len(papers) == len(citation["references"])
    for entry, reference in zip(papers, citation["references"], strict=True):
        names = [f"{person['family-names']}, {person['given-names']}" for person in reference["authors"]]
        assert entry["author"] == " and ".join(names)
        assert (entry["title"], entry["year"], entry["url"]) == (
            reference["title"],
            str(reference["year"]),
            reference["url"],
        )
        assert reference["identifiers"][0]["value"] == f"arXiv:{entry['eprint']}"
