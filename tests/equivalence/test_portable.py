"""Portable checkpoints: plain transformers loads them with `trust_remote_code=True`, and headprune is not needed."""

from __future__ import annotations

from pathlib import Path

import headprune
import other_process
from helpers import identical, kept_heads, outputs, pruned
from zoo import ZOO

NAMES = sorted(ZOO.keys() - {"gpt-neox", "llama-mqa"})


def test_every_family_loads_where_headprune_cannot_be_imported(tmp_path: Path) -> None:
    """The same outputs, the same parameters, and nothing that the weights did not fill."""
    for name in NAMES:
        other_process.write_case(tmp_path / name, ZOO[name], "some-heads", portable=True)
    report = other_process.load_all(tmp_path, portable=True)
    assert list(report) == NAMES
    assert {name: problems for name, problems in report.items() if problems} == {}
    for name in NAMES:  # and headprune reads a portable checkpoint as it reads any other
        model, expected = headprune.load(tmp_path / name / "checkpoint" / name), pruned(ZOO[name])[0]
        assert kept_heads(model) == kept_heads(expected)
        assert identical(outputs(model, ZOO[name].batch(0)), outputs(expected, ZOO[name].batch(0)))
        assert not hasattr(model.config, "auto_map")
