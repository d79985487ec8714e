"""Neurons gated to zero and neurons removed give the same, for every family; what they hold is what arithmetic says.

Every reference is a dense model that has never been cut, and has to differ from the ungated one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import headprune
from headprune.discovery.feed_forward import layouts_for
from headprune.errors import HeadSelectionError
from headprune.surgery.remove_units import remove_units
from headprune.units import Site, all_sites
from headprune.units.families import family_of
from headprune.units.feed_forward import feed_forward_sites
from headprune.units.resolve import neuron_sites
from helpers import MATTERS, NO_NEURONS, SAME_CODE, difference, families, flat, hook_count, outputs
from neuron_helpers import (
    CHOICES,
    Members,
    allowed,
    first_layer,
    gates_of,
    heads_of,
    kept_units,
    layers_of,
    neuron_layers,
    neuron_parameters,
    scattered,
    silenced,
    with_heads,
)
from zoo import ZOO, Entry


def check(entry: Entry, dense: Any, *rounds: Members) -> Any:
    """Remove round by round, and compare with gating all that have gone so far."""
    model, batch = entry.build(), entry.batch(1)
    sites = all_sites(dense)
    ungated, gone = outputs(dense, batch), []
    for members in rounds:
        gone += members
        reference = silenced(dense, gone, batch)
        assert difference(reference, ungated) > MATTERS
        remove_units(model, members)
        assert difference(reference, outputs(model, batch)) <= allowed(reference)
        went = set(gone)
        assert kept_units(model) == [
            tuple(unit for unit in range(site.original) if (site.index, unit) not in went) for site in sites
        ]
    assert hook_count(dense) == 0
    return model


@pytest.mark.parametrize("entry", families(without=NO_NEURONS))
def test_removed_is_gated(entry: Entry) -> None:
    dense = entry.build()
    for choose in CHOICES.values():
        check(entry, dense, choose(dense))


@pytest.mark.parametrize("entry", families(without=(*SAME_CODE, *NO_NEURONS)))
def test_rounds_go_on_in_original_ids(entry: Entry) -> None:
    """A layer loses some, then the rest, then attention and another layer lose theirs."""
    dense = entry.build()
    first = first_layer(dense)
    other = [(layers_of(dense)[-1].index, 3)] if len(layers_of(dense)) > 1 else []
    check(entry, dense, first[::3], [one for one in first if one not in first[::3]], [*first_head(dense), *other])


def first_head(model: Any) -> Members:
    return flat(heads_of(model)[0].units()[:1])


@pytest.mark.parametrize("entry", families(without=NO_NEURONS))
def test_closed_form_of_parameters(entry: Entry) -> None:
    """Some of every layer, and a layer as a whole, whose output bias stays."""
    dense = entry.build()
    layers = layers_of(dense)
    number, width = neuron_layers(entry, dense.config)
    assert [site.original for site in layers] == [width] * number
    before = sum(parameter.numel() for parameter in dense.parameters())
    for members in (scattered(dense, 5), first_layer(dense)):
        model = entry.build()
        remove_units(model, members)
        after = sum(parameter.numel() for parameter in model.parameters())
        assert before - after == len(members) * neuron_parameters(entry, dense.config)


def selections(sites: Sequence[Site], positions: Sequence[int]) -> dict[tuple[str, int], list[int]]:
    return {(axis.tensor, axis.dim): axis.left(positions) for site in sites for axis in site.axes}


@pytest.mark.parametrize("entry", families(having=(), without=(*SAME_CODE, *NO_NEURONS, "dinov2", "camembert")))
def test_the_table_says_what_the_experiment_says(entry: Entry) -> None:
    model = entry.build()
    assert family_of(model.config.model_type).feed_forward
    table = layers_of(model)
    measured = feed_forward_sites(model, layouts_for(type(model), model.config), {})
    positions = [0, 3, 7, 18]
    assert selections(table, positions) == selections(measured, positions)
    assert {site.o: set(site.maps) for site in table} == {site.o: set(site.maps) for site in measured}
    assert not any(site.obstacle_to_emptying for site in measured)


def test_sites_of_feed_forward_layers_come_after_attention() -> None:
    for name, applications in (("bert", 1), ("albert", 3), ("clip", 1)):
        model = ZOO[name].build()
        sites = all_sites(model)
        assert [site.index for site in sites] == list(range(len(sites)))
        assert [site.kind for site in sites] == sorted(site.kind for site in sites)
        layers = neuron_sites(model, heads_of(model))
        assert {site.applications for site in layers} == {applications}
    assert ["vision" in site.path for site in layers_of(ZOO["clip"].build())] == [True, True, False, False]


@pytest.mark.parametrize("name", ["bert", "llama-gqa", "gpt2", "t5"])
def test_gating_is_what_zeroed_columns_are(name: str) -> None:
    """The slow obvious truth about gates, column by column."""
    entry = ZOO[name]
    dense, oracle, batch = entry.build(), entry.build(), entry.batch(3)
    members = scattered(dense, 2)
    for site, neuron in members:
        weight = oracle.get_submodule(all_sites(dense)[site].o).weight.data
        (weight if name == "gpt2" else weight.T)[neuron] = 0.0  # Conv1D stores [in, out]
    reference = silenced(dense, members, batch)
    assert difference(reference, outputs(oracle, batch)) <= allowed(reference)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "t5", "bloom"])
def test_generation_with_a_cache(name: str) -> None:
    from headprune.training.fixed_gates import gated

    entry = ZOO[name]
    dense, model = entry.build(), entry.build()
    members = with_heads(dense)
    remove_units(model, members)
    inputs = {key: value for key, value in entry.batch(2).items() if not key.startswith("decoder_")}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    sites = all_sites(dense)
    with gated(dense, gates_of(sites, members), sites=sites):
        expected = dense.generate(**inputs, **options)
    for cache in ({}, {"use_cache": False}):
        assert torch.equal(model.generate(**inputs, **options, **cache), expected)


@pytest.mark.parametrize("name", ["bert", "llama-gqa", "t5", "gpt2"])
def test_training_goes_on(name: str) -> None:
    """With layers recomputed in the backward pass as well: the same gradients, and all that is left learns."""
    entry = ZOO[name]
    model = entry.build()
    remove_units(model, with_heads(model))
    other = copy.deepcopy(model)
    other.gradient_checkpointing_enable()
    other.train()
    for module in other.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    batch = entry.batch(4)
    for each in (model, other):
        sum(value.float().pow(2).mean() for value in tracked(each(**batch))).backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    own = [axis.tensor for site in layers_of(model) for axis in site.axes]
    assert all(gradients[tensor].abs().max() > 0 for tensor in own)
    for key, parameter in other.named_parameters():
        if key in gradients and name in ("bert", "llama-gqa"):  # others drop out by numbers of their own
            assert torch.allclose(parameter.grad, gradients[key], rtol=1e-4, atol=1e-5), key
    before = {key: parameter.detach().clone() for key, parameter in other.named_parameters()}
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert any(not torch.equal(before[key], parameter) for key, parameter in other.named_parameters())


def tracked(result: Any) -> list[torch.Tensor]:
    return [v for v in result.values() if isinstance(v, torch.Tensor) and v.is_floating_point() and v.requires_grad][:1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_in_another_precision(dtype: torch.dtype) -> None:
    entry = ZOO["llama-gqa"]
    dense, model, batch = entry.build().to(dtype), entry.build().to(dtype), entry.batch(1)
    members = scattered(dense)
    reference = silenced(dense, members, batch)
    remove_units(model, members, verify=batch)
    assert all(site.family == "llama" for site in layers_of(model))
    scale = 8 if dtype == torch.bfloat16 else 1  # few digits: sums in another order round elsewhere
    assert difference(reference, outputs(model, batch)) <= scale * allowed(reference)


@pytest.mark.parametrize("name", ["bert", "llama-gqa", "gpt2", "camembert"])
def test_remove_takes_neurons_and_lets_the_others_take_over(name: str) -> None:
    """The public verb: neurons of a site go, and what stays makes up for them on the calibration data."""
    batches = [ZOO[name].batch(seed) for seed in range(4)]
    dense = ZOO[name].build().eval()
    site = all_sites(dense)[-1]
    gone = [(site.index, neuron) for neuron in range(4)]
    errors = {}
    for repair in ("none", "lstsq"):
        model = copy.deepcopy(dense)
        headprune.remove(model, neurons=gone, repair=repair, batches=batches, verify=batches[0])
        assert all_sites(model)[-1].kept == tuple(range(4, site.original))
        errors[repair] = 0.0
        with torch.no_grad():
            for batch in batches:
                change = (model(**batch)[0] - dense(**batch)[0]).square().sum(-1)
                real = batch["attention_mask"].bool() if change.dim() == 2 else torch.ones_like(change).bool()
                errors[repair] += float(change[real].sum())
    assert errors["lstsq"] < errors["none"]


def test_heads_are_not_taken_for_neurons() -> None:
    model = ZOO["bert"].build()
    with pytest.raises(HeadSelectionError, match=r"Neuron \(0, 1\) does not exist: sites 3 to 5 of this model"):
        headprune.remove(model, neurons=[(0, 1)])
    with pytest.raises(HeadSelectionError, match=r"Head \(3, 0\) does not exist: the model has 3 sites"):
        headprune.remove(model, [(3, 0)])
    headprune.remove(model, [(0, 1)], neurons=[(3, 1)])
    assert [site.size for site in all_sites(model)] == [3, 4, 4, 19, 20, 20]
