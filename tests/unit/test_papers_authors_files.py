"""What the authors' files show: arithmetic on made-up curves, and the published files where they are present."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headprune.papers import ReproductionError
from headprune.papers.authors_files import (
    ROWS,
    accuracy_at,
    against,
    against_random,
    area,
    areas,
    areas_table,
    authors_findings,
    order_and_entropy,
    stops,
    stops_table,
    table_1_on_the_curve,
)
from headprune.papers.figure_data import Panel
from headprune.papers.paper_models import MODELS, find_model
from headprune.papers.published import read_curve
from headprune.papers.ranks import inversions, kendall, mean_ranks, spearman
from helpers import SHARED

FOLDER = SHARED / "reference" / "greedy-gnorm"
ROOT = Path(__file__).resolve().parents[2]
needs_published = pytest.mark.skipif(not FOLDER.is_dir(), reason="the authors' files of ../shared are not here")


# --- ranks ---


def slow_tau_b(one: list[float], other: list[float]) -> float:
    """Kendall's tau-b as it is defined, pair by pair."""
    score = first = second = 0
    for (a, b), (c, d) in itertools.combinations(zip(one, other, strict=True), 2):
        x, y = (a > c) - (a < c), (b > d) - (b < d)
        score, first, second = score + x * y, first + abs(x), second + abs(y)
    return score / math.sqrt(first * second)


@pytest.mark.parametrize("seed", range(5))
def test_rank_correlations_are_those_of_their_definitions(seed: int) -> None:
    chance = random.Random(seed)
    one = [float(chance.randrange(6)) for _ in range(15)]  # with ties
    other = [float(chance.randrange(6)) for _ in range(15)]
    ranks = [1 + sum(b < a for b in one) + (sum(b == a for b in one) - 1) / 2 for a in one]
    assert mean_ranks(one).tolist() == ranks
    assert spearman(one, other) == pytest.approx(np.corrcoef(mean_ranks(one), mean_ranks(other))[0, 1])
    assert kendall(one, other) == pytest.approx(slow_tau_b(one, other))
    expected = sum((a - c) * (b - d) < 0 for (a, b), (c, d) in itertools.combinations(zip(one, other, strict=True), 2))
    assert inversions(one, other) == expected


def test_orders_that_are_equal_or_opposite() -> None:
    up, down = [1.0, 2.0, 3.0, 10.0], [4.0, 3.0, 2.0, -7.0]
    assert (spearman(up, up), kendall(up, up), inversions(up, up)) == (1.0, 1.0, 0)
    assert (spearman(up, down), kendall(up, down), inversions(up, down)) == (-1.0, -1.0, 6)
    assert math.isnan(spearman(up, [1.0] * 4))
    assert math.isnan(kendall(up, [1.0] * 4))


# --- made-up curves ---


def panel(gnorm: list[float], trials: list[list[float]], **others: list[float]) -> Panel:
    """Curves measured at every second of 8 heads."""
    counts = range(0, 9, 2)
    curves = {"gnorm": gnorm, **{name.replace("_", ":"): values for name, values in others.items()}}
    return Panel(
        "made up",
        8,
        curves={name: list(zip(counts, values, strict=True)) for name, values in curves.items()},
        trials={count: [trial[place] for trial in trials] for place, count in enumerate(counts)},
    )


def test_area() -> None:
    assert area([(0, 1.0), (4, 1.0)]) == 1
    assert area([(0, 1.0), (1, 0.0), (3, 0.0)]) == pytest.approx(1 / 6)
    assert math.isnan(area([(0, 1.0)]))


def test_points_above_the_median_are_counted_without_the_ends() -> None:
    worse = [0.9, 0.5, 0.5, 0.5, 0.1]
    made = panel([0.9, 0.6, 0.5, 0.4, 0.1], [worse, worse, [0.9, 0.8, 0.8, 0.8, 0.1]])
    found = against_random(made, draws=200)
    assert {name: found[name] for name in ("points", "above", "equal", "below", "below_at", "best_trial_below")} == {
        "points": 3,
        "above": 1,
        "equal": 1,
        "below": 1,
        "below_at": [6],
        "best_trial_below": 0,
    }
    # The areas are 0.5, 0.5 (twice) and 0.725, so all three trials have at least the area of Greedy-Gnorm.
    assert found["trials_with_at_least_its_area"] == 3
    assert found["p_area"] == 1
    assert found["above_interval"][0] <= found["above"] <= found["above_interval"][1]
    assert found == against_random(made, draws=200)
    assert areas(made)["random"]["mean"] == pytest.approx((0.5 + 0.5 + 0.725) / 3)


def test_p_of_the_area_is_uniform_for_a_trial_among_trials() -> None:
    """Each of n curves in turn as Greedy-Gnorm, the others as trials: the values of p are 1/n, 2/n, ..., 1."""
    chance = random.Random(0)
    curves = [[0.9, *(chance.random() for _ in range(3)), 0.1] for _ in range(8)]
    shares = sorted(
        against_random(panel(one, [other for other in curves if other is not one]), draws=1)["p_area"] for one in curves
    )
    assert shares == pytest.approx([place / 8 for place in range(1, 9)])


def test_another_curve() -> None:
    made = panel([0.9, 0.8, 0.6, 0.4, 0.1], [[0.5] * 5], entropy=[0.9, 0.7, 0.6, 0.5, 0.1])
    found = against(made, "entropy")
    assert (found["points"], found["above"], found["equal"], found["below"]) == (3, 1, 1, 1)
    assert found["area_difference"] == pytest.approx(0)


def test_accuracy_at_a_share() -> None:
    found = accuracy_at(panel([0.9, 0.5, 0.8, 0.4, 0.1], [[0.5] * 5]), 0.7, rows=100)
    assert (found["removed"], found["pruned"]) == (4, 0.8)  # 70 % of 8 is 5.6, and 4 the last number measured before
    assert found["lowest_before"] == {"removed": 2, "accuracy": 0.5}
    assert found["change"] == pytest.approx(-0.1)
    low, high = found["change_interval"]
    assert (low + high) / 2 == pytest.approx(-0.1)
    assert (high - low) / 2 == pytest.approx(1.959964 * math.sqrt(0.09 / 100 + 0.16 / 100), rel=1e-5)


def test_order_and_entropy() -> None:
    """A method that removes the highest entropy first; of a shared site the mean over its layers counts."""
    assert order_and_entropy([(1, 0), (0, 1), (0, 0)], [[2.0, 3.0], [4.0, 1.0]]) == {"heads": 4, "spearman": -1.0}
    assert order_and_entropy([(0, 1), (0, 0)], [[0.0, 3.0, 1.0], [2.0, 3.0, -1.0]])["spearman"] == -1.0


def test_curves_that_end_early(tmp_path: Path) -> None:
    model = find_model("bert")
    short = panel([0.9, 0.5, 0.8, 0.4, 0.1], [[0.5] * 5])
    assert table_1_on_the_curve(model, short) == {"published": [96.82, 90.08], "curve": [90.0, None], "equal": False}
    assert stops(model, short)["accuracy_published"] is None
    apart = Panel("made up", 8, curves={"gnorm": [(1, 0.5)]}, trials={2: [0.5]})
    with pytest.raises(ReproductionError, match=r"have no numbers of heads in common; give the authors' own files\.$"):
        against_random(apart)


# --- the published files ---


@pytest.fixture(scope="module")
def findings() -> dict[str, Any]:
    return authors_findings(FOLDER)


@needs_published
def test_random_removal_on_the_published_curves(findings: dict[str, Any]) -> None:
    """Counted here by sorting; 14 of the points where RoBERTa-large is behind come first."""
    counted = {
        key: (found["against_random"]["above"], found["against_random"]["points"])
        for key, found in findings["models"].items()
    }
    assert counted == {"bert": (22, 23), "albert": (11, 11), "roberta": (6, 23), "xlm-roberta": (19, 23)}
    roberta = findings["models"]["roberta"]["against_random"]
    assert roberta["below_at"] == [*range(16, 225, 16), 336]
    assert roberta["trials_with_at_least_its_area"] == 22


@needs_published
def test_accuracies_are_shares_of_the_rows_that_are_named() -> None:
    for model in MODELS:
        values = [value for _, value in read_curve(FOLDER, model, "gnorm")]
        dense, *pruned = values
        if model.key != "xlm-roberta":  # its first point was measured on 10,000 rows
            pruned.append(dense)
        hits = [value * ROWS[model.key] for value in pruned]
        assert all(abs(count - round(count)) < 1e-4 for count in hits)


@needs_published
def test_roberta_at_two_shares(findings: dict[str, Any]) -> None:
    """Near the dense model with 70 % of the heads removed, and not with 30 %."""
    third, most = findings["models"]["roberta"]["pruned"]
    assert (third["removed"], third["pruned"], third["dense"]) == (115, 0.759, 0.878)
    assert third["change_interval"][1] < 0
    assert (most["removed"], most["pruned"]) == (268, 0.865)
    assert most["change_interval"][0] < 0 < most["change_interval"][1]
    assert most["lowest_before"] == {"removed": 121, "accuracy": 0.745}


@needs_published
def test_table_1_and_json(findings: dict[str, Any]) -> None:
    assert all(found["table_1"]["equal"] for found in findings["models"].values())
    assert "NaN" not in json.dumps(findings)


@needs_published
def test_tables_of_the_page_are_computed(findings: dict[str, Any]) -> None:
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert stops_table(findings) in page
    assert areas_table(findings) in page


@needs_published
def test_stored_findings_are_computed(findings: dict[str, Any]) -> None:
    stored = json.loads((ROOT / "benchmarks" / "results" / "claims" / "gnorm-authors-files.json").read_text())
    assert stored["settings"] == json.loads(json.dumps(findings["settings"]))
    assert flat(stored["models"]) == pytest.approx(flat(findings["models"]))


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Numbers by their path."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if parts is None:
        return {name: value}
    return {path: leaf for key, part in parts for path, leaf in flat(part, f"{name}/{key}").items()}


def test_the_page_says_what_the_search_for_a_rule_found() -> None:
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "benchmarks" / "results" / "stop_rules.json").read_text(encoding="utf-8"))
    assert found["published"] == [model.removed * model.applications for model in MODELS]
    assert f"of {found['tried']:,} pairs of a smoothing and a rule" in " ".join(page.split())
    equal = found["tried_by_stops_that_are_equal"]
    assert (equal["4"], equal["3"]) == (0, 2)
    assert sum(equal.values()) == found["tried"]
    assert [one["stops"] for one in found["at_least_three_equal"]] == [[117, 36, 64, 105]] * 2
