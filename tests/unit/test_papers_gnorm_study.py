"""The experiments on Greedy-Gnorm: bounds of entropy variants, orders of removal, areas and their differences."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

import headprune
from headprune.data import Examples
from headprune.papers import entropy_variants, gnorm_study
from headprune.papers.entropy_variants import EPSILONS, attention_rows, bound, bounds_hold, order_kept, underflow
from headprune.papers.gnorm_study import COMPARISONS, CURVES, Subject, outcomes, removal_order, study_gnorm, summarise
from headprune.papers.gnorm_tables import accuracy_table, comparisons_table, entropy_table, ranks_table

HEADS = [(site, head) for site in range(2) for head in range(4)]
STORED = ("minilm-sst2", "langid")
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "claims"


def examples(count: int, seed: int) -> Examples:
    chance = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(3, 9, (), generator=chance))
        ids = torch.randint(5, 30, (length,), generator=chance)
        rows.append(
            {
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "labels": torch.randint(0, 3, (), generator=chance),
            }
        )
    return Examples(rows, {})


@pytest.fixture
def subject() -> Subject:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=16,
        num_labels=3,
        max_position_embeddings=16,
        initializer_range=0.5,
    )
    return Subject("tiny", BertForSequenceClassification(config).eval(), examples(24, 1), examples(20, 2))


# --- bounds ---


def entropies(row: torch.Tensor, epsilon: float) -> dict[str, float]:
    """The three variants as they are defined."""
    values = row.tolist()
    return {
        "A": -sum(a * math.log(a) for a in values if a > 0),
        "B": -sum(a * math.log(a + epsilon) for a in values),
        "C": -sum((a + epsilon) * math.log(a + epsilon) for a in values),
    }


@pytest.mark.parametrize("epsilon", EPSILONS)
@pytest.mark.parametrize("keys", [1, 2, 7, 40])
def test_bounds_hold_for_rows_of_all_kinds(keys: int, epsilon: float) -> None:
    chance = torch.Generator().manual_seed(keys)
    scales = (0.0, 1.0, 5.0, 50.0)
    for scale in scales:
        for _ in range(10):
            row = (scale * torch.randn(keys, generator=chance, dtype=torch.float64)).softmax(0)
            found = entropies(row, epsilon)
            for variant in ("B", "C"):
                limit = bound(variant, keys, epsilon)
                assert limit.low - 1e-13 <= found[variant] - found["A"] <= limit.high + 1e-13


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_bounds_are_reached(epsilon: float) -> None:
    """The lower ones where all probabilities are equal; the upper ones, but for epsilon itself, where one is 1."""
    keys = 9
    equal = entropies(torch.full((keys,), 1 / keys, dtype=torch.float64), epsilon)
    certain = entropies(torch.eye(keys, dtype=torch.float64)[0], epsilon)
    for variant in ("B", "C"):
        limit = bound(variant, keys, epsilon)
        assert equal[variant] - equal["A"] == pytest.approx(limit.low, rel=1e-3, abs=1e-14)
        assert certain[variant] - certain["A"] == pytest.approx(limit.high, rel=1e-3, abs=2 * epsilon)


def test_every_row_of_attention_is_compared(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = subject.calibration.batches(8)
    found = bounds_hold(subject.model, batches)
    rows = 2 * 4 * sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert {entry["rows"] for entry in found.values()} == {rows}
    assert {entry["outside"] for entry in found.values()} == {0}
    assert all(-1e-3 < entry["places"][0] <= entry["places"][1] < 1 + 1e-3 for entry in found.values())
    narrow = entropy_variants.Bound(-1e-12, 1e-12)
    monkeypatch.setattr(entropy_variants, "bound", lambda *_: narrow)
    assert bounds_hold(subject.model, batches)["C, 1e-05"]["outside"] > 0


def test_rows_are_without_padding(subject: Subject) -> None:
    batches = subject.calibration.batches(24, full=True)
    maps = list(attention_rows(subject.model, batches))
    assert [part.shape[-1] for part in maps] == batches[0]["attention_mask"].sum(-1).tolist()
    assert len({part.shape[-1] for part in maps}) > 1
    for part in maps:
        assert torch.allclose(part.sum(-1), torch.ones(()))


def test_probabilities_that_are_zero_are_counted(subject: Subject) -> None:
    batches = subject.calibration.batches(8)
    assert underflow(subject.model, batches)["float32"] == 0
    sharp = copy.deepcopy(subject.model)
    for layer in sharp.bert.encoder.layer:
        layer.attention.self.query.weight.data *= 300
    found = underflow(sharp, batches)
    maps = list(attention_rows(sharp, batches))
    assert found["probabilities"] == sum(part.numel() for part in maps)
    assert found["float32"] == sum(value == 0 for part in maps for value in part.flatten().tolist()) > 0
    assert found["not_finite_in_float32"] == found["float32"] <= found["bfloat16"] <= found["float16"]


def test_pairs_that_the_bound_keeps_are_not_inverted() -> None:
    plain = [0.0, 1e-6, 0.5, 1.0]
    others = {"C, 1e-07": [2e-6, 1e-6, 0.5, 1.0]}
    found = order_kept(plain, others, [8, 12])["C, 1e-07"]
    assert (found["inversions"], found["pairs"]) == (1, 6)
    assert found["pairs_kept_by_the_bound"] == 5
    widths = [bound("C", keys, 1e-7) for keys in (8, 12)]
    assert found["width_of_bound"] == pytest.approx(sum(limit.high - limit.low for limit in widths) / 2)


# --- orders and outcomes ---


def test_orders_are_those_of_prune(subject: Subject) -> None:
    batches = subject.calibration.batches(gnorm_study.BATCH)
    for schedule in ("one-shot", "greedy"):
        actual = removal_order(subject, HEADS, schedule, "gnorm", seed=0, every=1)
        result = headprune.prune(
            copy.deepcopy(subject.model), batches, criterion="gnorm", schedule=schedule, repair="none", progress=False
        )
        assert actual == [tuple(head) for step in result.trajectory for head in step.removed]
        assert sorted(actual) == HEADS
    assert removal_order(subject, HEADS, "random", "", seed=3, every=1) != HEADS
    assert sorted(removal_order(subject, HEADS, "random", "", seed=3, every=1)) == HEADS


def test_outcomes_are_those_of_a_model_with_heads_set_to_zero(subject: Subject) -> None:
    removed = [(0, 1), (1, 0), (1, 3)]
    batches = subject.evaluation.batches(8)
    masked = copy.deepcopy(subject.model)
    for site, head in removed:
        masked.bert.encoder.layer[site].attention.output.dense.weight.data[:, 4 * head : 4 * head + 4] = 0
    with torch.no_grad():
        right = [
            int(masked(**b).logits[i].argmax() == b["labels"][i]) for b in batches for i in range(len(b["labels"]))
        ]
    assert outcomes(subject.model, removed, batches) == right
    assert 0 < sum(right) < len(right)


# --- areas and differences ---


def test_areas_and_differences() -> None:
    """Two samples, two seeds, three points; areas are (first / 2 + second + third / 2) / 2."""
    same = [[1, 1], [1, 0], [0, 0]]  # areas 0.75 and 0.25
    curves = {name: [same, same] for name in CURVES}
    curves["greedy"] = [same, [[1, 1], [1, 1], [0, 0]]]  # in the second run 0.75 and 0.75
    found = summarise(curves)
    assert found["curves"]["one-shot"]["area"] == 0.5
    assert found["curves"]["greedy"]["area_by_seed"] == [0.5, 0.75]
    assert found["curves"]["greedy"]["accuracy"] == [1, 0.75, 0]
    compared = found["comparisons"]["greedy against one-shot"]
    assert compared["difference"] == pytest.approx(0.125)
    assert compared["by_seed"] == pytest.approx([0, 0.25])
    assert compared["interval"][0] < 0.125 < compared["interval"][1]
    assert found["comparisons"]["one-shot against random"]["difference"] == 0
    assert set(found["comparisons"]) == set(COMPARISONS)
    assert set(summarise({"greedy": [same], "one-shot": [same]})["comparisons"]) == {"greedy against one-shot"}


# --- the study ---


def test_a_study_resumes(subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gnorm_study, "SAMPLES", 8)
    monkeypatch.setattr(gnorm_study, "POINTS", 2)
    first = study_gnorm(subject, tmp_path, seeds=(0,), every=4)
    assert first["heads"] == 8
    assert first["curves"]["greedy"]["accuracy"][0] == first["curves"]["random"]["accuracy"][0]  # the dense model
    assert len(first["curves"]["greedy"]["accuracy"]) == 3
    json.dumps(first, allow_nan=False)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("computed again")

    with monkeypatch.context() as patched:
        for name in ("outcomes", "removal_order", "rank_agreement", "entropy_order"):
            patched.setattr(gnorm_study, name, refuse)
        assert study_gnorm(subject, tmp_path, seeds=(0,), every=4) == first
        with pytest.raises(AssertionError, match="computed again"):  # other settings
            study_gnorm(subject, tmp_path, seeds=(0,), every=2)
    (tmp_path / "one-shot-0.json").unlink()
    assert study_gnorm(subject, tmp_path, seeds=(0,), every=4) == first


@pytest.mark.parametrize("name", STORED)
def test_stored_results_agree_with_themselves(name: str) -> None:
    """Areas are those of the accuracies, differences those of the areas, and no order breaks a bound."""
    found = json.loads((RESULTS / f"gnorm-{name}.json").read_text(encoding="utf-8"))
    for curve in found["curves"].values():
        for accuracy, area in zip(curve["accuracy_by_seed"], curve["area_by_seed"], strict=True):
            parts = [(one + other) / 2 for one, other in itertools.pairwise(accuracy)]
            assert area == pytest.approx(sum(parts) / len(parts))
    for claim, compared in found["comparisons"].items():
        one, other = (found["curves"][name]["area"] for name in COMPARISONS[claim])
        assert compared["difference"] == pytest.approx(one - other)
        assert compared["interval"][0] <= compared["difference"] <= compared["interval"][1]
    for seed in found["entropy"]:
        assert all(entry["outside"] == 0 for entry in seed["bounds"].values())
        assert all(one["inversions"] <= one["pairs"] - one["pairs_kept_by_the_bound"] for one in seed["order"].values())
    assert len(found["seeds"]) == len(found["entropy"]) == len(found["rank_agreement"]) == 3


def test_tables_of_the_page_are_made_from_the_stored_results() -> None:
    found = [json.loads((RESULTS / f"gnorm-{name}.json").read_text(encoding="utf-8")) for name in STORED]
    page = (RESULTS.parents[2] / "docs" / "reproduction.md").read_text(encoding="utf-8")
    for table in (accuracy_table, comparisons_table, ranks_table, entropy_table):
        assert table(found) in page


def test_cells_of_a_table() -> None:
    gap = {"difference": 0.0123, "interval": [-0.001, 0.02], "by_seed": [0.01, -0.5]}
    made = comparisons_table(
        [{"subject": "x", "comparisons": {}}, {"subject": "y", "comparisons": {"a against b": gap}}]
    )
    assert made.splitlines()[-1] == "| a against b | - | +0.012 (-0.001 to +0.020); +0.010, -0.500 |"
