"""Runs and scores are what they were: journals of five models by every schedule, and scores by every criterion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from golden_journals import cases, difference, read

FAST = ("bert-", "llama-gqa-")  # an encoder and a decoder; the other models are slow


def parameters() -> list[Any]:
    made = cases()
    return [
        pytest.param(*case, id=case[0], marks=[] if case[0].startswith(FAST) else pytest.mark.slow) for case in made
    ]


@pytest.mark.parametrize(("name", "make"), parameters())
def test_a_run_is_what_it_was(name: str, make: Callable[[], list[dict[str, Any]]]) -> None:
    actual = difference(make(), read(name))
    assert actual.startswith("the same"), actual
