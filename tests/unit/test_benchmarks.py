"""Benchmarks still run with the package as it is: their numbers are in the documentation."""

from __future__ import annotations

import importlib
import pkgutil

import benchmarks
import pytest
from benchmarks import budgets, score_coverage
from benchmarks.benchmark_models import BenchmarkModel

import headprune
from headprune.discovery.twin import Run
from score_helpers import labelled
from zoo import ZOO


def test_every_benchmark_can_be_imported() -> None:
    for module in pkgutil.iter_modules(benchmarks.__path__):
        if module.name != "__main__":
            importlib.import_module(f"benchmarks.{module.name}")


@pytest.mark.parametrize("method", ["headprune", "flap"])
def test_a_benchmark_of_budgets_compares_at_the_budget(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that overshoots its budget, or falls far below it, would be compared with the others at another size."""
    rows = [(labelled(ZOO["bert"], seed), row) for seed in (0, 1) for row in range(3)]
    samples = [{name: value[row] for name, value in batch.items()} for batch, row in rows]
    tiny = BenchmarkModel("bert", ZOO["bert"].build().eval(), samples, [labelled(ZOO["bert"], 2)], 4)
    monkeypatch.setattr(budgets, "load_model", lambda name: tiny)
    budgets.dense_quality.cache_clear()
    cells = budgets.run("bert", method, [0.8, 0.5], 0)
    assert 0.6 < cells[0.8]["left"] <= 0.8 + 1e-9
    assert 0.2 < cells[0.5]["left"] <= 0.5 + 1e-9


def test_coverage_says_why_scores_or_rounds_do_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two samples together and alone are compared, and an error without a text has its name."""
    model = ZOO["bert"].build().double().eval()
    runs = [Run("", {name: value[:2] for name, value in ZOO["bert"].batch(0).items()})]
    assert score_coverage.score_row(model, runs) == {"scores": "equal", "rounds": "finished", "score_reason": ""}
    assert score_coverage.score_row(model, []) == {"scores": "not run", "rounds": "not run"}

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(headprune, "score", fail)
    row = score_coverage.score_row(model, runs)
    assert (row["scores"], row["score_reason"]) == ("fails", "scores: RuntimeError: no text")
