"""The benchmark of budgets: cells are written one by one, run once, and one that fails does not stop the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import budgets
from benchmarks.subjects import Subject

from headprune.measure.costs import flops
from headprune.units import all_sites
from scoring import labelled
from zoo import ZOO


def tiny(family: str) -> Subject:
    samples = [
        {name: value[row] for name, value in labelled(ZOO[family], seed).items()}
        for seed in (0, 1)
        for row in (0, 1, 2)
    ]
    return Subject(family, ZOO[family].build().eval(), samples, [labelled(ZOO[family], 2)], 4)


@pytest.fixture(autouse=True)
def tiny_subjects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "MAKERS", {name: lambda name=name: tiny(name) for name in ("bert", "llama-gqa")})
    monkeypatch.setattr(budgets, "available", lambda *, long: ["bert", "llama-gqa"])
    budgets.subject.cache_clear()
    budgets.dense_quality.cache_clear()


def test_cells_are_kept_and_run_once(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: Any) -> None:
    out = tmp_path / "budgets.json"
    asked = [
        "--subjects",
        "bert",
        "--methods",
        "headprune,random",
        "--shares",
        "0.5",
        "--seeds",
        "0,1",
        "--out",
        str(out),
    ]
    assert budgets.main(asked) == 0
    cells = json.loads(out.read_text())["cells"]
    assert len(cells) == 4
    assert all(0.2 < cell["left"] <= 0.5 + 1e-9 for cell in cells)
    told = capsys.readouterr().out
    assert "| headprune | " in told
    assert "**" in told
    monkeypatch.setattr(budgets, "run", lambda *place: pytest.fail("a cell was run again"))
    assert budgets.main(asked) == 0
    assert capsys.readouterr().out == told


def test_a_cell_that_fails_says_why_and_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "budgets.json", budgets.run

    def fails(name: str, method: str, share: float, seed: int) -> Any:
        if method == "magnitude":
            raise RuntimeError("no luck")
        return real(name, method, share, seed)

    monkeypatch.setattr(budgets, "run", fails)
    asked = [
        "--subjects",
        "bert",
        "--methods",
        "magnitude,random",
        "--shares",
        "0.5",
        "--seeds",
        "0",
        "--out",
        str(out),
    ]
    assert budgets.main(asked) == 1
    assert "RuntimeError: no luck" in capsys.readouterr().out
    monkeypatch.setattr(budgets, "run", real)
    assert budgets.main(asked) == 0
    assert not any("error" in cell for cell in json.loads(out.read_text())["cells"])


def test_a_share_is_one_of_the_units_and_flap_has_its_biases() -> None:
    model = budgets.subject("llama-gqa").model
    counted = flops(model, all_sites(model))
    left = budgets.total_share(model, 0.5) * counted.total
    assert counted.total - left == pytest.approx(counted.units_total / 2)
    cell = budgets.run("llama-gqa", "flap", [0.5], 0)[0.5]
    assert cell["left"] <= 0.5 + 1e-9
    assert all(model.get_submodule(site.o).bias is None for site in all_sites(model))  # the dense one is as it was


def test_a_method_of_several_rounds_goes_through_all_shares_in_one_run() -> None:
    wanted = [("bert", method, share, 0) for share in (0.8, 0.5) for method in ("headprune", "flap")]
    assert list(budgets.runs(wanted, [wanted[3]])) == [("bert", "headprune", [0.8, 0.5], 0), ("bert", "flap", [0.8], 0)]
    cells = budgets.run("bert", "headprune", [0.8, 0.5], 0)
    assert all(cells[share]["left"] <= share + 1e-9 for share in (0.8, 0.5))
    assert cells[0.8]["left"] > cells[0.5]["left"]


@pytest.mark.parametrize("wrong", [["--methods", "flab"], ["--subjects", "nothing"]])
def test_wrong_names_are_refused(wrong: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        budgets.main(wrong)
    assert "flap" in (told := capsys.readouterr().err) or "cannot be had" in told
