"""Criteria of other training-free methods against loops, and Kwon's exchange of units that were chosen to leave."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch

import headprune
import peer_oracles
from headprune.criteria import make
from headprune.criteria.fisher import swap_units
from headprune.errors import CriterionError, DataError
from headprune.units import Member, all_sites
from neuron_oracles import neuron_oracle
from oracles import Oracle
from score_helpers import differing, is_language_model, labelled, model_of, scores, some_batches
from zoo import ZOO

ORACLES: dict[str, Any] = {
    "fluctuation": peer_oracles.fluctuation,
    "fluctuation(standardize=True)": lambda oracle: peer_oracles.fluctuation(oracle, standardize=True),
    "wanda": peer_oracles.wanda,
    "fisher": peer_oracles.fisher,
}
FAMILIES = ("bert", "llama-gqa", "gpt2")  # plain, grouped and gated, with transposed weights


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["heads", "neurons"])
def test_scores_are_those_of_the_slow_formulas(name: str, kind: str) -> None:
    entry, model = ZOO[name], model_of(name, "dense")
    make_oracle = Oracle if kind == "heads" else neuron_oracle
    oracle = make_oracle(model, some_batches(entry), next_token=is_language_model(entry))
    expected = {spec: formula(oracle) for spec, formula in ORACLES.items()}
    actual = scores(model, some_batches(entry), list(ORACLES), units=kind)
    assert differing(actual, expected) == {}


@pytest.mark.parametrize("spec", ["fluctuation", "wanda"])
def test_scores_that_cannot_be_merged_say_so_and_need_data(spec: str) -> None:
    model, batch = model_of("bert", "dense"), labelled(ZOO["bert"], 0)
    result = headprune.score(model, [batch], criterion=spec)
    with pytest.raises(CriterionError, match=f"{spec} cannot be merged"):
        result + result
    with pytest.raises(DataError, match="no batches"):
        headprune.score(model, [], criterion=spec)


def test_fisher_of_shards_adds_up() -> None:
    model, batches = model_of("bert", "dense"), some_batches(ZOO["bert"])
    parts = [headprune.score(model, [batch], criterion="fisher") for batch in batches]
    whole = headprune.score(model, batches, criterion="fisher").scores
    assert torch.allclose((parts[0] + parts[1]).scores, whole)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [0, 1, 3, 6, 7])
def test_an_exchange_is_never_worse_than_the_smallest_squares(seed: int, count: int) -> None:
    gradients = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    smallest = gradients.square().sum(0).argsort()[:count].tolist()
    measured = swap_units(gradients, count)
    assert len(set(measured)) == count
    assert peer_oracles.effect(gradients, measured) <= peer_oracles.effect(gradients, smallest) + 1e-12
    best = min(peer_oracles.effect(gradients, units) for units in itertools.combinations(range(7), count))
    assert peer_oracles.effect(gradients, measured) >= best - 1e-12


def test_units_that_stand_in_for_each_other_do_not_leave_together() -> None:
    """Two equal gradients add up to four times the square of one; two opposite ones to nothing."""
    gradients = torch.tensor([[1.0, 1.0, -1.1]], dtype=torch.float64)
    assert swap_units(gradients, 2) in ([0, 2], [1, 2])


def test_what_is_exchanged_stays_at_its_site_in_whole_units() -> None:
    model = ZOO["llama-gqa"].build()
    sites = all_sites(model)
    chosen = [
        member for site in sites for unit in site.units()[: max(1, site.size // site.group // 2)] for member in unit
    ]
    task = headprune.task_of(model)
    batches = some_batches(ZOO["llama-gqa"])
    measured = make("fisher(rearrange=True)").rearranged(chosen, model, sites, batches, task, "given")
    assert Counter(member.site for member in measured) == Counter(member.site for member in chosen)
    assert all(set(sites[site].unit(member)) <= set(measured) for site, member in measured)
    assert make("fisher").rearranged([Member(0, 1)], model, sites, batches, task, "given") == [Member(0, 1)]
