"""The benchmark of gates and recovery: what it keeps, what it runs again, and what its table says."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks import gates


def row(name: str, seed: int, recovered: float) -> dict[str, Any]:
    seconds = {"pruning": 1.0, "recovery": 1.0}
    numbers = {"pruned": 0.8, "recovered": recovered, "heads": 36, "flops": 0.5, "seconds": seconds}
    return {"row": name, "seed": seed, **numbers}


def test_a_mean_is_held_against_what_is_allowed() -> None:
    """One point, half a point and none below the dense model, by the mean over seeds."""
    rows = [row("gates", 0, 0.860), row("gates", 1, 0.864), row("heads", 0, 0.866), row("flops-30", 0, 0.872)]
    lines = {line.split(" | ")[0][2:]: line for line in gates.table(0.872, rows).splitlines() if line.startswith("| ")}
    assert lines["gates"].endswith("| 86.20% | met |")
    assert lines["heads"].endswith("| 86.70% | MISSED |")
    assert lines["flops-30"].endswith("| 87.20% | met |")
    assert "flops-20" not in lines
    assert "**86.20%** | 86.00% / 86.40%" in lines["gates"]


def test_rows_that_are_there_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], int]] = []

    def run(make: Any, wanted: list[str], seed: int, subject: Any) -> list[dict[str, Any]]:
        asked.append((list(wanted), seed))
        return [row(name, seed, 0.9) for name in wanted]

    monkeypatch.setattr(gates, "run", run)
    monkeypatch.setattr(gates, "available", lambda: ["minilm-sst2"])
    monkeypatch.setattr(gates, "minilm_sst2", lambda: SimpleNamespace(model=None, evaluation=[]))
    monkeypatch.setattr(gates, "accuracy", lambda *_: 0.9)
    out = tmp_path / "gates.json"
    assert gates.main(["--seeds", "0", "--rows", "gates,flops-20", "--out", str(out)]) == 0
    assert asked == [(["gates"], 0), (["flops-20"], 0)]
    asked.clear()
    assert gates.main(["--seeds", "0,1", "--out", str(out)]) == 0
    assert asked == [(["heads"], 0), (["flops-30"], 0), (["gates"], 1), (["heads"], 1), (["flops-30", "flops-20"], 1)]
    assert len(json.loads(out.read_text())["rows"]) == 8
    kept = json.loads(out.read_text())
    kept["settings"]["sentences"] = 5  # other settings, other rows
    out.write_text(json.dumps(kept))
    asked.clear()
    gates.main(["--seeds", "0", "--rows", "gates", "--out", str(out)])
    assert asked == [(["gates"], 0)]
