"""Criteria of neurons against their oracles, and what scores of neurons have in common with those of heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import headprune
from headprune.errors import CriterionError
from headprune.hooks.outputs import run
from headprune.signals import Entropy, GateGradients, tokens
from headprune.training.fixed_gates import gated
from headprune.units import all_sites, kept_mask, resolve, widest
from headprune.units.members import Member
from headprune.units.slicing.removal import slice_weights
from neuron_oracles import neuron_oracle
from score_helpers import FROM_TOKENS, differing, is_language_model, labelled, labels_of, precise, scores
from zoo import ZOO

# One hidden map and two, separate and fused; Conv1D; flattened tokens; tied layers; two stacks; images.
FAMILIES = ["bert", "llama", "phi3", "modernbert", "gpt2", "opt", "albert", "bart", "t5", "vit", "distilbert"]
CRITERIA = {
    "his": lambda oracle: oracle.his(),
    "tis": lambda oracle: oracle.his(),
    "his(normalize=True)": lambda oracle: oracle.his(normalize=True),
    "taylor": lambda oracle: oracle.taylor(),
    "magnitude": lambda oracle: oracle.magnitude(),
    "residual-gradient": lambda oracle: oracle.repair(),
    "residual-gradient(residual=False)": lambda oracle: oracle.repair(residual=False),
    "residual-error": lambda oracle: oracle.lstsq(),
}


def built(name: str, *, pruned: bool = False) -> Any:
    """In float64; `pruned`: some neurons and some heads are gone."""
    model = ZOO[name].build().double().eval()
    if pruned:
        sites = all_sites(model)
        own = [site for site in sites if site.kind == "neurons"]
        gone = [Member(own[0].index, neuron) for neuron in (0, 3, 4)] + list(sites[0].units()[0])
        if not own[-1].obstacle_to_emptying and len(own) > 1:
            gone += [Member(own[-1].index, neuron) for neuron in own[-1].kept]
        slice_weights(model, sites, gone)
    return model


def data(name: str) -> list[Any]:
    entry = ZOO[name]
    return [labelled(entry, 0), {key: value[:2] for key, value in labelled(entry, 5).items()}]


@pytest.mark.parametrize("pruned", [False, True], ids=["dense", "pruned"])
@pytest.mark.parametrize("name", FAMILIES)
def test_scores_of_neurons_are_those_of_the_oracle(name: str, pruned: bool) -> None:
    model, entry = built(name, pruned=pruned), ZOO[name]
    oracle = neuron_oracle(model, data(name), labels=labels_of(entry), next_token=is_language_model(entry))
    actual = scores(model, data(name), list(CRITERIA), labels=labels_of(entry), units="neurons")
    assert differing(actual, {criterion: truth(oracle) for criterion, truth in CRITERIA.items()}) == {}


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_have_the_same_scores_beside_neurons(name: str) -> None:
    """One table of both: its rows are those of heads alone and of neurons alone."""
    model = built(name)
    names = [*CRITERIA, "random", "inverse:his"]
    heads, neurons, both = (
        scores(model, data(name), names, labels=labels_of(ZOO[name]), units=units)
        for units in ("heads", ("neurons",), ("neurons", "heads"))
    )
    attention, width = len(resolve(model)), widest(resolve(model))
    for criterion in names:
        assert torch.allclose(both[criterion][:attention, :width], heads[criterion], rtol=1e-9, equal_nan=True)
        assert both[criterion][:attention, width:].isnan().all()
        assert neurons[criterion][:attention].isnan().all()
        assert torch.allclose(both[criterion][attention:], neurons[criterion][attention:], rtol=1e-9, equal_nan=True)


@pytest.mark.parametrize("name", ["bert", "opt", "albert"])
def test_layers_too_wide_for_the_memory_are_scored_in_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = built(name), [precise(built(name), batch) for batch in data(name)]
    whole = headprune.score(model, batches, criteria=list(CRITERIA), units="heads,neurons")
    monkeypatch.setattr(tokens, "TOKEN_BYTES", 1)
    apart = headprune.score(model, batches, criteria=list(CRITERIA), units="heads,neurons")
    assert differing(apart.scores, whole.scores) == {}
    streaming = [name for name in CRITERIA if name not in FROM_TOKENS]
    one, other = (headprune.score(model, [batch], criteria=streaming, units="heads,neurons") for batch in batches)
    assert differing((one + other).scores, {name: whole.scores[name] for name in streaming}) == {}


@pytest.mark.parametrize("name", FAMILIES)
def test_gates_of_neurons_at_one_change_no_bit_and_at_zero_are_removal(name: str) -> None:
    model, batch = built(name), precise(built(name), ZOO[name].batch(0))
    sites = all_sites(model)
    gates = torch.ones(len(sites), widest(sites), dtype=torch.float64)
    with gated(model, gates, sites=sites):
        assert all(torch.equal(one, other) for one, other in zip(run(model, batch), run(model, batch), strict=True))
        open_gates = run(model, batch)
    assert all(torch.equal(one, other) for one, other in zip(open_gates, run(model, batch), strict=True))
    site = sites[-1]
    gates[site.index, [1, 2]] = 0
    with gated(model, gates, sites=sites):
        closed = run(model, batch)
    slice_weights(model, sites, [Member(site.index, 1), Member(site.index, 2)])
    assert all(torch.allclose(one, other, atol=1e-9) for one, other in zip(closed, run(model, batch), strict=True))


@pytest.mark.parametrize("name", ["gnorm", "hies", "entropy", "deficit", "attribution", "inverse:gnorm"])
def test_criteria_of_attention_are_refused_for_neurons(name: str) -> None:
    with pytest.raises(CriterionError, match=r"has no score for neurons; criteria that have one are: .*his.*taylor"):
        headprune.score(ZOO["bert"].build(), data("bert"), criterion=name, units="heads,neurons")


@pytest.mark.parametrize("units", ["head", "", (), 3, None, ("heads", 1)])
def test_units_that_are_none_are_refused(units: Any) -> None:
    with pytest.raises(CriterionError, match="units must be heads, neurons or both"):
        headprune.score(ZOO["bert"].build(), data("bert"), units=units)


def test_what_is_kept_is_what_was_asked_for() -> None:
    model = built("bert", pruned=True)
    result = headprune.score(model, data("bert"), criterion="his", units="neurons")
    sites = all_sites(model)
    expected = kept_mask(sites)
    expected[: len(resolve(model))] = False
    assert torch.equal(result.kept, expected)
    assert [site.kind for site in result.sites] == [site.kind for site in sites]
    with pytest.raises(CriterionError, match="same model"):
        result + headprune.score(model, data("bert"), criterion="his")


def test_experts_are_told_apart_by_sample() -> None:
    """An expert sees the tokens that are sent to it, of all samples in one row: their number may divide by chance."""
    config = transformers.SwitchTransformersConfig(
        vocab_size=50,
        d_model=16,
        d_kv=4,
        d_ff=20,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_experts=3,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.SwitchTransformersForConditionalGeneration(config).double().eval()
    draw = torch.Generator().manual_seed(1)
    lengths = {"input_ids": 8, "decoder_input_ids": 6, "labels": 6}
    batch = {name: torch.randint(1, 50, (3, length), generator=draw) for name, length in lengths.items()}
    oracle = neuron_oracle(model, [batch])
    assert sum("experts" in site.path for site in oracle.sites) == 6
    names = [name for name in CRITERIA if name != "residual-error"]  # the oracle's stream has all tokens
    actual = scores(model, [batch], names, units="neurons")
    assert differing(actual, {name: CRITERIA[name](oracle) for name in names}) == {}


def test_a_criterion_of_ones_own_knows_what_its_requests_know() -> None:
    class Gates(headprune.Criterion):
        def requests(self) -> Any:
            return (GateGradients("loss"),)

    class Maps(headprune.Criterion):
        def requests(self) -> Any:
            return GateGradients("loss"), Entropy()

    class Weights(headprune.Criterion):
        pass

    class Declared(headprune.Criterion):
        kinds = ("heads", "neurons")

    assert [kind().kinds for kind in (Gates, Maps, Weights, Declared)] == [
        ("heads", "neurons"),
        ("heads",),
        ("heads",),
        ("heads", "neurons"),
    ]
