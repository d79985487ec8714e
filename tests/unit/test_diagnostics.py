"""Figure 2 of the paper: how far weight gradients move, against explicit autograd before and after a real removal."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional

import headprune
from headprune.errors import DataError, HeadSelectionError
from headprune.measure.diagnostics import gradient_change
from helpers import assert_unchanged, state_of
from oracles import Oracle
from score_helpers import is_language_model, labelled
from zoo import ZOO

FAMILIES = {
    "bert": [(1, 2)],
    "albert": [(0, 1)],
    "gpt2": [(0, 0), (2, 3)],
    "llama-gqa": [(1, 2), (1, 3)],
    "t5": [(4, 1)],
}


def gradients(model: Any, batches: list[Any], name: str) -> dict[tuple[int, str], dict[int, torch.Tensor]]:
    """(site, role) -> {original head or group: gradient of its rows}, of the mean norm of the logits, one sample at a
    time without padding."""
    oracle = Oracle(model, batches, next_token=is_language_model(ZOO[name]))
    weights = oracle.weight_gradients(sum(oracle.norm(sample) for sample in oracle.samples) / len(oracle.samples))
    actual: dict[tuple[int, str], dict[int, torch.Tensor]] = {}
    for site in oracle.sites:
        for role in "qkv":
            axis = site.roles[role]
            rows = weights[axis.module]
            width = 1 if role == "q" else site.group
            for position in range(len(axis.units)):
                own = actual.setdefault((site.index, role), {})
                own[site.kept[position * width] // width] = rows[axis.indices([position])].clone()
    return actual


@pytest.mark.parametrize("name", FAMILIES)
def test_the_change_is_that_of_explicit_gradients(name: str) -> None:
    """Against a model whose heads were really removed: there, their own gradients are no more, so their rows are 0."""
    batches = [labelled(ZOO[name], 0), labelled(ZOO[name], 1)]
    if name == "t5":  # its decoder inputs are given, so labels have no part in it
        batches = [{key: value for key, value in batch.items() if key != "labels"} for batch in batches]
    dense, heads = ZOO[name].build(), FAMILIES[name]
    change = gradient_change(dense, batches, heads, grid=3)
    before = gradients(dense, batches, name)
    after = gradients(headprune.remove(copy.deepcopy(dense), heads), batches, name)
    assert change.removed == heads
    assert change.relative.shape == (ZOO[name].sites, 3)
    assert change.grids.shape == (ZOO[name].sites, 3, 3, 3)
    for site in range(ZOO[name].sites):
        for number, role in enumerate("qkv"):
            old = before[site, role]
            new = {head: after.get((site, role), {}).get(head, torch.zeros_like(rows)) for head, rows in old.items()}
            one, other = torch.cat(list(old.values())), torch.cat([new[head] for head in old])
            assert change.relative[site, number] == pytest.approx(float((other - one).norm() / one.norm()), rel=1e-3)
            pooled = functional.adaptive_avg_pool2d((other - one).abs()[None], 3)[0]
            torch.testing.assert_close(change.grids[site, number].double(), pooled, rtol=1e-3, atol=1e-7)


def test_all_layers_move_and_not_only_the_pruned_one() -> None:
    """That is the point of the figure: scores of other layers go stale as well."""
    change = gradient_change(ZOO["bert"].build(), [labelled(ZOO["bert"], 0)], [(1, 2)])
    assert (change.relative > 1e-3).all()


def test_the_model_stays_as_it_was() -> None:
    model = ZOO["bert"].build()
    model.bert.embeddings.requires_grad_(False)
    before = state_of(model)
    gradient_change(model, [labelled(ZOO["bert"], 0)], [(0, 0)])
    assert_unchanged(model, before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_pruned_model_can_be_looked_at() -> None:
    model = headprune.remove(ZOO["bert"].build(), [(0, 1), *((2, head) for head in range(4))])
    change = gradient_change(model, [labelled(ZOO["bert"], 0)], [(0, 2)])
    assert (change.relative[2] == 0).all()  # a site that is gone has no gradients
    assert (change.relative[:2] > 0).all()


WRONG = {
    "none": ([], "Name at least one head"),
    "unknown": ([(0, 9)], "does not exist"),
    "half-a-group": ([(0, 0)], "can only be removed together"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_heads(case: str) -> None:
    heads, message = WRONG[case]
    name = "llama-gqa" if case == "half-a-group" else "bert"
    with pytest.raises((DataError, HeadSelectionError), match=message):
        gradient_change(ZOO[name].build(), [labelled(ZOO[name], 0)], heads)


def test_no_batches() -> None:
    with pytest.raises(DataError, match="no batches"):
        gradient_change(ZOO["bert"].build(), [], [(0, 0)])
