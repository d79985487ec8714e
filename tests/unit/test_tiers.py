"""What `make test` runs is some of everything: every room has tests there."""

from __future__ import annotations

import ast
from pathlib import Path

from helpers import REPRESENTATIVE, families
from rooms import MAY_IMPORT, imported_rooms
from tiers import FAST, SLOW, SLOW_TESTS, is_slow

TESTS = Path(__file__).resolve().parents[1]


def test_every_room_has_fast_tests() -> None:
    files = {str(file.relative_to(TESTS)) for file in TESTS.glob("*/test_*.py")}
    fast = {file for file in files if not is_slow(file)} | {name.split("::")[0] for name in FAST}
    tested = {room for file in fast for room in imported_rooms(ast.parse((TESTS / file).read_text()))}
    assert MAY_IMPORT.keys() - tested == set()


def test_what_is_listed_is_there() -> None:
    assert [path for path in SLOW if not (TESTS / path).exists()] == []
    for name in (*FAST, *SLOW_TESTS):
        file, test = name.split("[")[0].split("::")
        assert f"def {test}(" in (TESTS / file).read_text(), name
        assert file.startswith(SLOW) == (name in FAST), f"{name} need not be listed"


def test_families_that_are_not_representative_are_slow() -> None:
    fast = [case.values[0].name for case in families() if not case.marks]
    assert sorted(fast) == sorted(REPRESENTATIVE)
