"""Random kills lose nothing of a run, and the comparison that says so would see a loss."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from benchmarks.random_kills import KINDS, Kind, forked, kill_repeatedly, pruning, warm_up
from benchmarks.random_kills_fixtures import Material, differences, lost, make_material, whole_lines

KILLS = 8


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("kills") / "material")


def test_random_kills_lose_nothing(material: Material, tmp_path: Path) -> None:
    kind = Kind("prune", pruning("--keep", "26", "--criterion", "gnorm"), 1.0, forked)
    warm_up(kind, material, tmp_path)
    count = kill_repeatedly(kind, material, KILLS, random.Random(0), tmp_path / "kills")
    assert (count.refused, count.problems) == ("", [])
    assert count.kills == len(count.moments) == KILLS
    assert count.starts == count.kills + count.rounds - count.late
    check_that_changes_are_seen(tmp_path / "kills" / "alone", tmp_path / "kills" / "killed")


def check_that_changes_are_seen(alone: Path, killed: Path) -> None:
    """Each of these is a loss that the comparison must name."""
    expected = whole_lines(alone)
    (lines,) = expected.values()
    assert list(lost({"steps.jsonl": lines[:3]}, {"steps.jsonl": lines[:3]}, expected, 0.0)) == []
    assert "3 steps that are not there" in next(
        lost({"steps.jsonl": lines[:3]}, {"steps.jsonl": lines[:2]}, expected, 0)
    )
    other = json.dumps({**json.loads(lines[1]), "metric": -1.0}).encode() + b"\n"
    assert "did not take" in next(lost({}, {"steps.jsonl": [lines[0], other]}, expected, 1e-6))
    near = json.loads(lines[1])
    near["loss"] *= 1 + 1e-8
    assert list(lost({}, {"steps.jsonl": [lines[0], json.dumps(near).encode()]}, expected, 1e-6)) == []
    assert list(differences(alone, killed, 0.0)) == []
    weights = killed / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"oops")
    (killed / "curve.csv").unlink()
    problems = list(differences(alone, killed, 0.0))
    assert [problem for problem in problems if "curve.csv is in one of them only" in problem]
    assert [problem for problem in problems if "model.safetensors is another" in problem]
    assert [problem for problem in problems if "does not load" in problem]  # its fingerprint is another


def test_a_command_that_is_refused_is_no_success(material: Material, tmp_path: Path) -> None:
    kind = Kind("prune", pruning("--keep", "nothing"), 1.0, forked)
    count = kill_repeatedly(kind, material, KILLS, random.Random(0), tmp_path / "kills")
    assert count.kills == 0
    assert "ended with 2: Error: --keep takes a share" in count.refused


def test_all_the_kills_are_shared_out() -> None:
    assert sum(kind.share for kind in KINDS) == pytest.approx(1.0)
    assert {"prune", "layerwise", "train", "distributed", "ray"} <= {kind.name for kind in KINDS}
