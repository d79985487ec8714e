"""Runs and scores are what they were: journals of five models by every schedule, and scores by every criterion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from golden_journals import cases, difference, read


@pytest.mark.parametrize(("name", "make"), [pytest.param(name, make, id=name) for name, make in cases()])
def test_a_run_is_what_it_was(name: str, make: Callable[[], list[dict[str, Any]]]) -> None:
    found = difference(make(), read(name))
    assert found.startswith("the same"), found
