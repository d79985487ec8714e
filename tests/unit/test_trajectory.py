"""Steps, their journal form, the curve and the area under it."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import random
from typing import Any

import pytest
import torch

import headprune
from headprune.measure.curves import area
from headprune.measure.trajectory import Step, curve_csv, removed_until
from headprune.units.members import Head, Member
from run_helpers import STEP_KEYS, trapezoids
from score_helpers import labelled
from zoo import ZOO


def step(number: int, heads: int, metric: float, **changes: Any) -> Step:
    values = {
        "removed": (Head(0, number),),
        "score": 0.125,
        "agreement": 0.75,
        "loss": 1.5,
        "applied": {"heads": 3 * heads},
        "parameters": 1000 - number,
        "flops": 500 - number,
        "scores": torch.tensor([[0.1, math.nan], [1e-30, 3.0]], dtype=torch.float64),
        **changes,
    }
    return Step(step=number, units={"heads": heads}, metric=metric, **values)


def test_a_step_survives_the_journal_bit_for_bit() -> None:
    before = step(3, 5, 1 / 3, loss=2 / 7, scores=torch.tensor([[math.pi, math.nan], [1e-300, -0.1]]).double())
    line = json.dumps(before.to_json())
    after = Step.from_json(json.loads(line))
    assert json.dumps(after.to_json()) == line
    assert after.removed == before.removed
    assert (after.metric, after.loss) == (before.metric, before.loss)
    assert torch.equal(after.scores.isnan(), before.scores.isnan())
    assert torch.equal(after.scores.nan_to_num(7.0), before.scores.nan_to_num(7.0))


REPAIRS = (
    {"site": 0, "kind": "lstsq", "error_without": 2 / 3, "error": 1 / 7},
    {"site": 2, "kind": "none", "error_without": None, "error": None},
)


def test_compensation_survives_the_journal() -> None:
    before = step(3, 5, 0.5, repairs=REPAIRS)
    line = json.dumps(before.to_json(), allow_nan=False)
    assert json.loads(line)["compensation"] == list(REPAIRS)
    after = Step.from_json(json.loads(line))
    assert after.repairs == REPAIRS
    assert json.dumps(after.to_json()) == line


def test_a_journal_that_knows_of_no_compensation_still_loads() -> None:
    line = step(3, 5, 0.5).to_json()
    del line["compensation"]
    assert Step.from_json(line).repairs == ()
    assert Step.from_json(line).to_json() == {**line, "compensation": []}


def test_what_is_no_number_is_null() -> None:
    """JSON has no NaN, and other programs read the journal."""
    line = json.dumps(step(1, 5, math.nan, loss=None, agreement=None).to_json(), allow_nan=False)
    actual = json.loads(line)
    assert actual.keys() >= STEP_KEYS
    assert (actual["metric"], actual["loss"], actual["agreement"]) == (None, None, None)
    assert actual["scores"] == [[0.1, None], [1e-30, 3.0]]
    assert math.isnan(Step.from_json(actual).metric)


def test_the_dense_step() -> None:
    actual = step(0, 6, 0.9, removed=(), score=None, scores=None).to_json()
    assert (actual["step"], actual["removed"], actual["scores"]) == (0, [], None)
    assert Step.from_json(actual).scores is None


def test_what_is_gone_until_a_step() -> None:
    steps = [step(0, 4, 1.0, removed=()), step(1, 2, 0.5, removed=(Head(0, 1), Head(1, 0))), step(2, 1, 0.4)]
    assert removed_until(steps, 0) == []
    assert removed_until(steps, 1) == [(0, 1), (1, 0)]
    assert removed_until(steps, 2) == [(0, 1), (1, 0), (0, 2)]


def test_the_curve_has_the_authors_columns_first() -> None:
    text = curve_csv([step(0, 6, 0.9), step(1, 5, 1 / 3, agreement=None), step(2, 4, 0.25)])
    rows = list(csv.DictReader(io.StringIO(text)))
    assert text.startswith("Pruned_Heads,Accuracy,")
    assert text.endswith("\n")
    assert [(row["Pruned_Heads"], row["Removed_Heads"]) for row in rows] == [("0", "0"), ("3", "1"), ("6", "2")]
    assert [float(row["Accuracy"]) for row in rows] == [0.9, 1 / 3, 0.25]  # all digits
    assert [row["Agreement"] for row in rows] == ["0.75", "", "0.75"]
    assert [row["Step"] for row in rows] == ["0", "1", "2"]


def test_albert_counts_a_head_once_per_layer_as_the_paper_does() -> None:
    model, batches = ZOO["albert"].build(), [labelled(ZOO["albert"], 0)]
    applications = headprune.resolve(model)[0].applications
    assert applications == 3
    result = headprune.prune(model, batches)
    rows = list(csv.DictReader(io.StringIO(curve_csv(result.trajectory))))
    assert [int(row["Pruned_Heads"]) for row in rows] == [0, 3, 6, 9, 12]
    assert [int(row["Removed_Heads"]) for row in rows] == [0, 1, 2, 3, 4]
    assert [(s.heads, s.applied_heads) for s in result.trajectory] == [(4, 12), (3, 9), (2, 6), (1, 3), (0, 0)]


def test_the_area_is_that_of_trapezoids_over_the_share_removed() -> None:
    steps = [step(0, 8, 1.0), step(1, 6, 0.8), step(2, 5, 0.3), step(3, 0, 0.1)]
    points = [(0, 1.0), (2 / 8, 0.8), (3 / 8, 0.3), (1, 0.1)]
    assert area(steps) == pytest.approx(trapezoids(points))
    assert area([step(0, 4, 0.6), step(1, 0, 0.6)]) == pytest.approx(0.6)
    assert area([step(0, 4, 1.0), step(1, 0, 0.0)]) == pytest.approx(0.5)


@pytest.mark.parametrize("word", ["lstsq", "mean", "none"])
def test_each_step_tells_how_its_sites_were_compensated(word: Any) -> None:
    batches = [labelled(ZOO["bert"], 0), labelled(ZOO["bert"], 5)]
    result = headprune.prune(ZOO["bert"].build(), batches, repair=word, every=3)
    dense, *rest = result.trajectory
    assert dense.repairs == ()
    left = [4, 4, 4]
    for one in rest:
        touched = sorted({head.site for head in one.removed})
        assert [repair["site"] for repair in one.repairs] == (touched if word != "none" else [])
        for head in one.removed:
            left[head.site] -= 1
        for repair in one.repairs:
            assert repair.keys() == {"site", "kind", "error_without", "error"}
            assert 0 <= repair["error"] <= repair["error_without"]
            # A site that is empty has nobody left to take over but the bias.
            assert repair["kind"] == ("mean" if not left[repair["site"]] else word)


def test_a_single_step_has_no_area() -> None:
    assert math.isnan(area([step(0, 4, 0.6)]))


def test_each_step_tells_what_was_removed_and_its_score() -> None:
    batches = [labelled(ZOO["llama-gqa"], 0)]
    result = headprune.prune(ZOO["llama-gqa"].build(), batches, every=2)
    dense, *rest = result.trajectory
    assert (dense.step, dense.removed, dense.score, dense.scores) == (0, (), None, None)
    gone: set[Head] = set()
    for number, one in enumerate(rest, start=1):
        assert one.step == number
        assert all(math.isfinite(one.scores[head]) for head in one.removed)
        assert one.score == pytest.approx(sum(float(one.scores[head]) for head in one.removed) / len(one.removed))
        assert {Head(*place) for place in one.scores.isnan().nonzero().tolist()} == gone
        gone |= set(one.removed)
    flops = [one.flops for one in result.trajectory]
    assert flops == sorted(flops, reverse=True)
    assert flops[-1] == 0


def wide_step(ids: dict[int, list[int]], *, width: int, sites: int = 6, **changes: Any) -> Step:
    """One that takes heads and neurons: `sites` of attention, and as many feed-forward layers after them."""
    table = torch.rand(2 * sites, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table[:sites, 12:] = math.nan
    table[-1] = math.nan
    neurons = [Member(site, index) for site, own in ids.items() for index in own]
    values: dict[str, Any] = {"units": {"heads": 70, "neurons": 4000}, "applied": {"heads": 70, "neurons": 4000}}
    values |= {"removed": (*reversed(neurons), Head(5, 1), Head(0, 3)), "scores": table, "attention": (sites, 12)}
    values["widths"] = {site: width - len(ids.get(site, ())) for site in range(sites, 2 * sites)}
    return dataclasses.replace(step(1, 70, 0.5), **{**values, **changes})


@pytest.mark.parametrize("width", [1536, 6144])
@pytest.mark.parametrize("scattered", [True, False])
def test_a_step_of_thousands_of_neurons_is_a_short_line(scattered: bool, width: int) -> None:
    every = [(site, neuron) for site in range(6, 12) for neuron in range(width)]
    chosen = random.Random(0).sample(every, 5000) if scattered else every[:5000]
    ids: dict[int, list[int]] = {}
    for site, neuron in chosen:
        ids.setdefault(site, []).append(neuron)
    before = wide_step(ids, width=width)
    line = json.dumps(before.to_json(), allow_nan=False)
    assert len(line) < 8000
    assert all(len(json.dumps(values)) < 200 for values in json.loads(line)["neuron_scores"].values())
    after = Step.from_json(json.loads(line))
    assert after.removed == before.removed
    assert after.widths == before.widths
    assert json.dumps(after.to_json()) == line


def test_neurons_that_cannot_be_read_are_damage_and_no_bug() -> None:
    line = wide_step({6: [1]}, width=20).to_json()
    for damaged in ("bits:AAAA", "bits:!", "1-x"):
        with pytest.raises(ValueError, match=r"."):
            Step.from_json({**line, "removed_neurons": {"6": damaged}})


def test_heads_go_before_neurons_whatever_the_order_they_were_named_in() -> None:
    """The order of a replay is that of the journal, so it is that of the run as well."""
    made = wide_step({7: [9, 3], 6: [4]}, width=20)
    assert made.removed == (Head(5, 1), Head(0, 3), Member(6, 4), Member(7, 3), Member(7, 9))
    assert made.removed_heads == ((5, 1), (0, 3))
    assert made.removed_neurons == ((6, 4), (7, 3), (7, 9))
    assert (made.heads, made.neurons, made.left) == (70, 4000, 4070)
    line = made.to_json()
    assert line["removed"] == [[5, 1], [0, 3]]
    assert line["removed_neurons"] == {"6": "4", "7": "3,9"}


def test_scores_of_neurons_are_deciles_in_the_journal() -> None:
    made = wide_step({}, width=2001)
    table = made.scores
    assert table is not None
    table[8] = torch.arange(2001.0)
    line = dataclasses.replace(made, neuron_scores=None).to_json()
    assert line["neuron_scores"]["8"] == [200.0 * part for part in range(11)]
    assert line["neuron_scores"]["11"] is None
    assert [len(row) for row in line["scores"]] == [12] * 6
    after = Step.from_json(line).scores
    assert after is not None
    assert torch.equal(after[:6], table[:6, :12])
    assert after.shape == (12, 12)
    assert after[6:].isnan().all()


def test_a_step_of_heads_alone_is_the_line_it_always_was() -> None:
    assert not {"attention", "removed_neurons", "neuron_scores"} & step(1, 5, 0.5).to_json().keys()


def test_the_curve_has_columns_of_neurons_only_where_there_are_any() -> None:
    dense = wide_step({}, width=20, removed=())
    after = dataclasses.replace(dense, step=1, units={"heads": 70, "neurons": 3990}, removed=(Member(6, 1),))
    first, *rows = csv.reader(io.StringIO(curve_csv([dense, after])))
    assert first[-2:] == ["Removed_Neurons", "Neurons"]
    assert [row[-2:] for row in rows] == [["0", "4000"], ["10", "3990"]]
    assert "Neuron" not in curve_csv([step(0, 6, 0.5)])
