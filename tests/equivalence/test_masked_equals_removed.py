"""The core promise: a model with heads gated to zero and the model without those heads compute the same.

Every reference is a dense model that has never been cut, and has to differ from the ungated one, so that no test passes
because nothing happened.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headprune
from headprune.units.linear import is_transposed
from helpers import (
    EAGER_ONLY,
    MATTERS,
    TOLERANCE,
    Heads,
    all_units,
    difference,
    families,
    flat,
    gated_outputs,
    gates_without,
    hook_count,
    kept_heads,
    outputs,
    with_attention,
)
from zoo import ZOO, Entry

BOUNDED = settings(
    max_examples=6,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@functools.lru_cache(maxsize=1)
def dense_of(entry: Entry) -> Any:
    """Shared by the checks of a test: gates come off again, and nothing else is done to it."""
    return entry.build()


def units_of(entry: Entry) -> list[Any]:
    return all_units(headprune.resolve(dense_of(entry)))


def check(entry: Entry, *rounds: Heads, attention: str | None = None, seed: int = 1) -> None:
    """Remove the heads round by round, and compare with gating all that have gone so far."""
    model, dense, batch = entry.build(), dense_of(entry), entry.batch(seed)
    if attention:
        model, dense = with_attention(model, attention), with_attention(entry.build(), attention)
    sites = headprune.resolve(dense)
    assert hook_count(dense) == 0
    ungated = outputs(dense, batch)
    gone: Heads = []
    for heads in rounds:
        gone += heads
        reference = gated_outputs(dense, batch, gates_without(sites, gone))
        assert difference(reference, ungated) > MATTERS
        assert headprune.remove(model, heads) is model
        assert difference(reference, outputs(model, batch)) <= TOLERANCE
        expected = [tuple(h for h in range(entry.heads) if (site.index, h) not in gone) for site in sites]
        assert kept_heads(model) == expected
    assert all(site.original_heads == entry.heads for site in headprune.resolve(model))


@pytest.mark.parametrize("entry", families())
@BOUNDED
@given(data=st.data())
def test_random_subset(entry: Entry, data: st.DataObject) -> None:
    units = units_of(entry)
    chosen = data.draw(st.sets(st.integers(0, len(units) - 1), min_size=1, max_size=len(units) - 1 or 1))
    check(entry, flat(units[place] for place in sorted(chosen)), seed=data.draw(st.integers(0, 50)))


@pytest.mark.parametrize("entry", families())
def test_every_whole_site(entry: Entry) -> None:
    for site in headprune.resolve(dense_of(entry)):
        check(entry, flat(site.units()))


@pytest.mark.parametrize("entry", families())
def test_all_heads_but_one_unit(entry: Entry) -> None:
    units = units_of(entry)
    for kept in (units[0], units[-1], random.Random(entry.name).choice(units)):
        check(entry, flat(unit for unit in units if unit != kept))


@pytest.mark.parametrize("entry", families())
def test_two_rounds_in_original_ids(entry: Entry) -> None:
    units = units_of(entry)
    random.Random(entry.name + "rounds").shuffle(units)
    third = max(1, len(units) // 3)
    check(entry, flat(units[:third]), flat(units[third : 2 * third]))


@pytest.mark.parametrize("entry", families())
def test_second_round_empties_what_the_first_began(entry: Entry) -> None:
    """A site loses a unit, then the rest of its heads, then another site loses some: no state is left behind."""
    first, *rest = headprune.resolve(dense_of(entry))
    units = first.units()
    later = [flat(rest[-1].units()[:1])] if rest else []
    check(entry, *[heads for heads in (flat(units[:1]), flat(units[1:])) if heads], *later)


@pytest.mark.parametrize("entry", families(without=EAGER_ONLY))
def test_under_eager_attention(entry: Entry) -> None:
    units = units_of(entry)
    chosen = random.Random(entry.name).sample(units, max(1, len(units) // 2))
    check(entry, flat(chosen), attention="eager")


@pytest.mark.parametrize("entry", families())
def test_gating_is_what_zeroed_columns_of_the_output_projection_are(entry: Entry) -> None:
    """The slow obvious truth about gates: a head is silent when its columns of the output projection are zero."""
    dense, oracle, batch = entry.build(), entry.build(), entry.batch(3)
    sites = headprune.resolve(dense)
    heads = flat(random.Random(entry.name).sample(all_units(sites), max(1, len(all_units(sites)) // 2)))
    for site, head in heads:
        weight = oracle.get_submodule(sites[site].o).weight.data
        columns = weight if is_transposed(oracle.get_submodule(sites[site].o)) else weight.T  # Conv1D stores [in, out]
        columns[head * entry.head_dim : (head + 1) * entry.head_dim] = 0.0
    assert difference(gated_outputs(dense, batch, gates_without(sites, heads)), outputs(oracle, batch)) <= TOLERANCE


@pytest.mark.parametrize("entry", families())
def test_verify_accepts_a_right_removal(entry: Entry) -> None:
    model = entry.build()
    heads = flat(headprune.resolve(model)[0].units()[:1])
    assert headprune.remove(model, heads, verify=entry.batch(5)) is model
    assert set(heads).isdisjoint((0, head) for head in kept_heads(model)[0])


def test_removing_nothing_changes_nothing() -> None:
    model = ZOO["bert"].build()
    before = dict(model.named_parameters())
    headprune.remove(model, [])
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert not getattr(model.config, "pruned_heads", None)
