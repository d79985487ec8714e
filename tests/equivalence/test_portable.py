"""Portable checkpoints: plain transformers loads them with `trust_remote_code=True`, and headprune is not needed."""

from __future__ import annotations

from pathlib import Path

import pytest

import headprune
import other_process
from helpers import SAME_CODE, identical, kept_heads, outputs, pruned, telling_variant
from zoo import ZOO

NAMES = sorted(name for name in ZOO if name not in SAME_CODE)
HALVES = {"first-half": NAMES[: len(NAMES) // 2], "second-half": NAMES[len(NAMES) // 2 :]}


@pytest.mark.parametrize("names", HALVES.values(), ids=HALVES)
def test_every_family_loads_where_headprune_cannot_be_imported(names: list[str], tmp_path: Path) -> None:
    """The same outputs, the same parameters, and nothing that the weights did not fill."""
    for name in names:
        other_process.write_case(tmp_path / name, ZOO[name], telling_variant(ZOO[name]), portable=True)
    report = other_process.load_all(tmp_path, portable=True)
    assert list(report) == names
    assert {name: problems for name, problems in report.items() if problems} == {}
    for name in names:  # and headprune reads a portable checkpoint as it reads any other
        model = headprune.load(tmp_path / name / "checkpoint" / name)
        expected = pruned(ZOO[name], telling_variant(ZOO[name]))[0]
        assert kept_heads(model) == kept_heads(expected)
        assert identical(outputs(model, ZOO[name].batch(0)), outputs(expected, ZOO[name].batch(0)))
        assert not hasattr(model.config, "auto_map")
