"""Refusals, undoing, and errors that were planted: what must not be offered, and what a proof must find."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from benchmarks import small_models
from torch import nn

import headprune
from headprune.errors import EquivalenceError, HeadSelectionError, UnsupportedModelError
from headprune.surgery.check_removable import check_removable
from headprune.surgery.remove_units import remove_units
from headprune.units import FeedForward, Layout, Member, Site, all_sites, families, register_family
from headprune.units.slicing.record import from_ranges, to_ranges
from headprune.units.spec import ForwardNeeds
from helpers import assert_unchanged, outputs, state_of
from neuron_helpers import first_layer, kept_units, layers_of, scattered
from zoo import GQA, ZOO, _model

BITNET = _model("BitNetForCausalLM", "BitNetConfig", **GQA)


# --- words ------------------------------------------------------------------------------------------------------------

WRONG = {
    "unknown-neuron": ([(4, 20)], r"Neuron \(4, 20\) does not exist: site 4 \(\S+\) has neurons 0 to 19\."),
    "negative": ([(5, -1)], r"Neuron \(5, -1\) does not exist"),
    "unknown-site": ([(6, 0)], r"Neuron \(6, 0\) does not exist: the model has 6 sites, numbered 0 to 5\."),
    "head-among-them": ([(3, 1), (0, 4)], r"Head \(0, 4\) does not exist: site 0 \(\S+\) has heads 0 to 3\."),
    "gone": ([(3, 2)], r"Neuron \(3, 2\) has been removed already; leave it out\."),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_neuron(case: str) -> None:
    model = ZOO["bert"].build()
    remove_units(model, [(3, 2)])
    before = state_of(model)
    members, message = WRONG[case]
    with pytest.raises(HeadSelectionError, match=message):
        remove_units(model, members)
    assert_unchanged(model, before)


def layer(**changes: Any) -> Site:
    site: Any = layers_of(ZOO["bert"].build())[0]
    return dataclasses.replace(site, index=0, **changes)


def test_a_layer_that_cannot_be_emptied_says_so() -> None:
    site = layer(needs=ForwardNeeds(empty=""))
    check_removable([site], [Member(0, neuron) for neuron in site.kept[1:]])
    with pytest.raises(
        UnsupportedModelError,
        match=r"Not all neurons of site 0 .* so some must stay; leave one unit\.",
    ):
        check_removable([site], [Member(0, neuron) for neuron in site.kept])


def test_a_layer_that_cannot_be_pruned_says_so() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Neurons of site 0 .* cannot be removed exactly: of a reason"):
        check_removable([layer(obstacle="of a reason")], [Member(0, 1)])


def test_units_of_neurons_go_together() -> None:
    with pytest.raises(
        HeadSelectionError, match=r"Neuron \(0, 5\) is part of a group.*\[4, 5, 6, 7\].*add \[4, 6, 7\]"
    ):
        check_removable([layer(group=4)], [Member(0, 5)])


def test_many_neurons_are_checked_in_one_go() -> None:
    """Every neuron is asked about once, and not looked for among all others."""
    asked = 0

    class Counting(int):
        def __eq__(self, other: object) -> bool:
            nonlocal asked
            asked += 1
            return int(self) == other

        def __hash__(self) -> int:
            return int.__hash__(self)

    site = layer(kept=tuple(map(Counting, range(2000))), original=2000)
    check_removable([site], [Member(0, neuron) for neuron in range(1999)])
    assert asked <= 4 * 2000  # a search would be millions


# --- undoing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "phi3"])
def test_a_failure_leaves_the_model_as_it_was(name: str) -> None:
    model = ZOO[name].build()
    remove_units(model, scattered(model))
    before, kept, said = state_of(model), kept_units(model), outputs(model, ZOO[name].batch(1))

    def fail() -> None:
        assert kept_units(model) != kept
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        remove_units(model, first_layer(model), afterwards=fail)
    assert_unchanged(model, before)
    assert kept_units(model) == kept
    again = outputs(model, ZOO[name].batch(1))
    assert all(torch.equal(said[key], again[key]) for key in said)


class Block(nn.Module):
    """A feed-forward layer with something between its maps that has an entry of every neuron, or mixes them all."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 20), nn.Linear(20, 24)
        self.norm = nn.LayerNorm(20) if between == "norm" else nn.Identity()
        self.scale = nn.Parameter(torch.linspace(0.5, 2.0, 20)) if between == "scale" else None
        if between == "buffer":
            self.register_buffer("fixed", torch.linspace(0.5, 2.0, 20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.gelu(self.up(x))
        inner = inner * self.scale if self.scale is not None else inner
        inner = inner * self.fixed if hasattr(self, "fixed") else inner
        return x + self.down(self.norm(inner))


class Own(nn.Module):
    def __init__(self, between: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 24)
        self.blocks = nn.ModuleList(Block(between) for _ in range(2))
        self.answer = nn.Linear(24, 3)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        states = self.embed(tokens)
        for block in self.blocks:
            states = block(states)
        return {"logits": self.answer(states)}


class Encoder(nn.Module):
    """torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 24)
        one = nn.TransformerEncoderLayer(24, 4, 20, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(one, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"states": self.encoder(self.embed(tokens))}


def tokens() -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(0, 30, (2, 7), generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("kind", [Own, Encoder, lambda: Own("scale")], ids=["own", "torch", "scale"])
def test_a_module_of_ones_own(kind: Any) -> None:
    """Verified against gates on a batch: some of one layer, and all of another; then it learns."""
    torch.manual_seed(0)
    model = kind().eval()
    first, second = layers_of(model)
    size = sum(parameter.numel() for parameter in model.parameters())
    gone = [*((first.index, n) for n in range(20)), *((second.index, n) for n in (1, 4, 5))]
    remove_units(model, gone, verify=tokens())
    assert [site.size for site in layers_of(model)] == [0, 17]
    scales = hasattr(model, "blocks") and model.blocks[0].scale is not None
    assert size - sum(parameter.numel() for parameter in model.parameters()) == 23 * (2 * 24 + 1 + scales)
    with torch.no_grad():
        assert all(torch.isfinite(value).all() for value in model(**tokens()).values())
    sum(value.sum() for value in model.train()(**tokens()).values()).backward()


def test_undo_brings_back_what_is_no_parameter() -> None:
    """A sliced buffer is another tensor in the same place: it must come back as well."""
    site = dataclasses.replace(layers_of(Own())[0])
    assert site.kept  # the layer itself is found
    from headprune.units.slicing.slices import Slices
    from headprune.units.slicing.undo import Undo

    model = Own("buffer")
    undo = Undo(model)
    slices = Slices(model)
    slices.add("blocks.0.fixed", 0, [0, 1])
    slices.apply()
    assert model.blocks[0].fixed.shape == (2,)
    undo()
    assert model.blocks[0].fixed.shape == (20,)


# --- planted errors ---------------------------------------------------------------------------------------------------


def test_a_norm_over_the_neurons_is_not_offered() -> None:
    """Without one neuron the others would be scaled otherwise."""
    torch.manual_seed(0)
    assert len(layers_of(Own())) == 2
    with pytest.raises(UnsupportedModelError, match="Neither attention nor a feed-forward layer"):
        all_sites(Own("norm"))


def test_a_norm_over_the_neurons_of_a_transformers_model_is_not_offered() -> None:
    model = BITNET()
    assert any("ffn_sub_norm" in name for name, _ in model.named_parameters())
    with pytest.raises(UnsupportedModelError, match="Neither attention nor a feed-forward layer"):
        all_sites(model)


@pytest.mark.usefixtures("clean_table", "nothing_proven")
def test_a_table_that_overlooks_the_norm_is_refused() -> None:
    gated = FeedForward(("gate_proj", "up_proj"), "down_proj")
    attention = [Layout("self_attn", "q_proj", "k_proj", "v_proj", "o_proj")]
    register_family("bitnet", model_types=["bitnet"], layouts=attention, stack="decoder", feed_forward=[gated])
    model = BITNET()
    site = layers_of(model)[0]
    before = state_of(model)
    with pytest.raises(UnsupportedModelError, match=r"BitNet\w+ does not run with these units removed"):
        headprune.remove(model, neurons=[(site.index, 1)])
    assert_unchanged(model, before)


@pytest.mark.usefixtures("nothing_proven")
@pytest.mark.parametrize("name", ["phi3", "modernbert"])
def test_a_table_with_the_wrong_order_of_blocks_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up projection in one weight, taken for entries side by side: shapes fit, numbers do not."""
    model = ZOO[name].build()
    wrong = []
    for family in families.FAMILIES:
        swapped = tuple(dataclasses.replace(layout, interleaved=True) for layout in family.feed_forward)
        mine = model.config.model_type in family.model_types
        wrong.append(dataclasses.replace(family, feed_forward=swapped) if mine else family)
    monkeypatch.setattr(families, "FAMILIES", wrong)
    site = layers_of(model)[0]
    before = state_of(model)
    with pytest.raises(EquivalenceError):
        headprune.remove(model, neurons=[(site.index, 1)])
    assert_unchanged(model, before)


# --- the record -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 3, 7], "0-3,7"), ([9, 4, 5, 11, 10], "4-5,9-11")]
)
def test_ranges(ids: list[int], text: str) -> None:
    assert to_ranges(ids) == text
    assert from_ranges(text) == sorted(ids)


def test_the_record_of_a_config() -> None:
    model = ZOO["bert"].build()
    remove_units(model, [(4, 7), (4, 6), (0, 2), (5, 0)])
    assert model.config.pruned_neurons == {"1": "6-7", "2": "0"}
    assert model.config.pruned_heads == {"0": [2]}


@pytest.mark.slow
def test_neurons_of_two_hidden_layers_in_a_row() -> None:
    """The MLPs of SAM's mask decoder: the middle map loses rows for one site and columns for the other, at once, and
    stays as long as either has neurons."""
    torch.manual_seed(0)
    model, runs = small_models.build("sam")
    sites = [site for site in all_sites(model) if "hypernetworks_mlps.0" in site.path]
    assert len(sites) == 2
    (first,) = [site for site in sites if site.o.endswith("layers.0")]
    (second,) = [site for site in sites if site.o.endswith("proj_out")]
    dense = copy.deepcopy(model)
    removed = [Member(site.index, neuron) for site in sites for neuron in site.kept[::2]]
    headprune.remove(model, neurons=removed)
    middle = model.get_submodule(first.o)
    assert middle.weight.shape == (second.size - len(second.kept[::2]), first.size - len(first.kept[::2]))
    with torch.no_grad():
        for site in sites:
            dense.get_submodule(site.o).weight[:, list(range(0, site.size, 2))] = 0
    assert small_models.agree(small_models.outputs(dense, runs), small_models.outputs(model, runs))
    for site in sites:
        with pytest.raises(UnsupportedModelError, match="some must stay"):
            headprune.remove(dense, neurons=[Member(site.index, neuron) for neuron in site.kept])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"rounds": 2}, {"rounds": 2, "repair": "lstsq"}], ids=["dense", "lstsq"])
def test_outputs_that_are_units_of_another_site_are_not_refitted(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, runs = small_models.build("sam")
    (batch,) = [run.inputs for run in runs if not run.path]
    result = headprune.prune(model, [batch], keep_parameters=0.9, units="neurons", **options)
    feeding = {site.index for site in all_sites(model) if site.feeds_units}
    removed = {site for step in result.trajectory for site, _ in step.removed}
    refitted = {repair["site"] for step in result.trajectory for repair in step.repairs if repair["kind"] != "none"}
    assert feeding & removed
    assert refitted
    assert not feeding & refitted


@pytest.mark.slow
def test_no_site_between_an_output_map_of_attention_and_the_next_map() -> None:
    """TimeSformer has a linear map right behind one attention's output map."""
    torch.manual_seed(0)
    model, _ = small_models.build("timesformer")
    sites = all_sites(model)
    outputs_of_attention = {site.o for site in sites if site.kind == "heads"}
    neurons = [site for site in sites if site.kind == "neurons"]
    assert neurons
    assert not any(outputs_of_attention & {*site.maps} for site in neurons)
