"""What one unit costs, of every kind and family: parameters and FLOPs against what is gone when units are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from headprune.measure import costs, flop_count
from headprune.measure.costs import flops, head_parameters, total_parameters, unit_bytes, unit_costs, unit_parameters
from headprune.surgery.remove_units import remove_units
from headprune.units import Site, all_sites, resolve
from helpers import NO_NEURONS, SAME_CODE, families, flat
from zoo import ZOO, Entry


def some(sites: Sequence[Site]) -> dict[int, int]:
    """site -> how many of its units go: other numbers at every site, and never all."""
    return {site.index: (site.index + 2) % len(site.units()) for site in sites}


def without(model: Any, sites: Sequence[Site], numbers: dict[int, int]) -> None:
    remove_units(model, flat(unit for site in sites for unit in site.units()[: numbers.get(site.index, 0)]))


def truth(model: Any, inputs: dict[str, torch.Tensor]) -> int:
    model.requires_grad_(False)  # whose tracker of modules asks for graphs otherwise
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=flop_count.FORMULAS) as counter:
        model(**{name: value[:1] for name, value in inputs.items()})
    return counter.get_total_flops()


@pytest.mark.parametrize("entry", families(without=SAME_CODE))
def test_parameters_and_flops_that_leave(entry: Entry) -> None:
    model = entry.build()
    model.set_attn_implementation("eager")  # torch has no formula for the fused attention of a CPU
    batch = {name: value for name, value in entry.batch(0).items() if "mask" not in name}
    sites = all_sites(model)
    assert {site.kind for site in sites} == ({"heads"} if entry.name in NO_NEURONS else {"heads", "neurons"})
    numbers = some(sites)
    parameters, products = unit_parameters(model, sites), unit_costs(model, sites, batch=batch)
    dense = total_parameters(model), truth(model, batch)
    counted = flops(model, sites, batch=batch)
    assert counted.total == dense[1]
    assert counted.heads + counted.neurons == counted.units_total <= counted.total
    assert unit_bytes(model, sites) == [4 * count for count in parameters]
    without(model, sites, numbers)
    assert total_parameters(model) == dense[0] - sum(parameters[site] * many for site, many in numbers.items())
    assert truth(model, batch) == dense[1] - sum(products[site] * many for site, many in numbers.items())
    assert flops(model, all_sites(model), batch=batch).total == truth(model, batch)
    assert unit_parameters(model, all_sites(model)) == parameters
    assert unit_costs(model, all_sites(model), batch=batch) == products


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "llama", "all-attention"])
def test_without_any_unit(name: str) -> None:
    """Of layers all of whose maps belong to sites no product is left, and units that are gone cost nothing."""
    entry = ZOO[name]
    model, batch = entry.build(), {"input_ids": entry.batch(0)["input_ids"]}
    model.set_attn_implementation("eager")
    sites = all_sites(model)
    dense, held = flops(model, sites, batch=batch), sum(head_parameters(model, site) for site in sites)
    parameters = total_parameters(model)
    remove_units(model, flat(unit for site in sites for unit in site.units()))
    empty = all_sites(model)
    assert truth(model, batch) == dense.total - dense.units_total
    assert parameters - total_parameters(model) == held
    assert unit_costs(model, empty, batch=batch) == unit_parameters(model, empty) == unit_bytes(model, empty)
    assert sum(unit_parameters(model, empty)) == 0
    assert flops(model, empty, batch=batch).units_total == 0


def test_a_neuron_of_bert_by_hand() -> None:
    """A row and its bias, a column, and the two products of every token with them."""
    model, width, tokens = ZOO["bert"].build(), 24, 9
    sites = all_sites(model)
    neurons = [site.index for site in sites if site.kind == "neurons"]
    assert {unit_parameters(model, sites)[index] for index in neurons} == {2 * width + 1}
    assert {unit_costs(model, sites, tokens=tokens)[index] for index in neurons} == {2 * tokens * 2 * width}


def test_a_unit_of_grouped_heads_is_the_whole_group() -> None:
    entry = next(entry for entry in ZOO.values() if entry.heads > entry.kv_heads > 1 and "llama" in entry.name)
    model = entry.build()
    width, group = model.config.hidden_size, entry.heads // entry.kv_heads
    own = entry.head_dim * width * (2 * group + 2)
    assert unit_parameters(model, resolve(model)) == [own] * entry.sites


def test_half_precision_takes_half_the_bytes() -> None:
    model = ZOO["bert"].build().to(torch.bfloat16)
    sites = all_sites(model)
    assert unit_bytes(model, sites) == [2 * count for count in unit_parameters(model, sites)]


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2"])
def test_by_weights_where_the_forward_needs_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO[name].build()
    sites = all_sites(model)
    seen = flops(model, sites, tokens=12).kinds, unit_costs(model, sites, tokens=12)
    monkeypatch.setattr(costs, "count", lambda *args: None)
    assert (flops(model, sites, tokens=12).kinds, unit_costs(model, sites, tokens=12)) == seen


def test_one_run_serves_for_every_number_of_units(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = ZOO["bert"].build(), []
    flop_count._cache.clear()
    real = flop_count._count
    monkeypatch.setattr(flop_count, "_count", lambda *args: (calls.append(1), real(*args))[1])
    for _ in range(3):
        sites = all_sites(model)
        flops(model, sites, tokens=12)
        without(model, sites, {site.index: 1 for site in sites})
    assert len(calls) == 1
