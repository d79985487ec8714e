"""Wrong input to `resolve`, `gated`, `remove` and `register_family`: one clear sentence each, and nothing changed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import headprune
import headprune.surgery.remove_units
import headprune.units.slicing.slices
from headprune.errors import (
    CheckpointError,
    EquivalenceError,
    GateError,
    HeadpruneError,
    HeadSelectionError,
    RegistrationError,
    UnsupportedModelError,
)
from headprune.units import families
from helpers import assert_unchanged, flat, identical, outputs, state_of
from zoo import GQA, VOCAB, ZOO


def says(*parts: str) -> str:
    """A pattern: these parts, in this order."""
    return ".*".join(re.escape(part) for part in parts)


SELECTIONS = {
    "not-iterable": ("bert", 3, says("iterable of (site, head) pairs", "[(0, 3), (2, 1)]", "not 3")),
    "not-pairs": ("bert", [0, 1], says("must be a (site, head) pair such as (0, 3), not 0")),
    "three-numbers": ("bert", [(0, 1, 2)], says("must be a (site, head) pair", "not (0, 1, 2)")),
    "a-mapping": ("bert", {0: [1, 2]}, says("must be a (site, head) pair such as (0, 3), not 0")),
    "fractions": ("bert", [(0, 1.0)], says("pair of whole numbers", "not (0, 1.0)")),
    "booleans": ("bert", [(True, False)], says("pair of whole numbers", "not (True, False)")),
    "words": ("bert", ["ab"], says("pair of whole numbers", "not 'ab'")),
    "unknown-site": ("bert", [(3, 0)], says("(3, 0) does not exist", "3 sites, numbered 0 to 2")),
    "negative-site": ("bert", [(-1, 0)], says("(-1, 0) does not exist", "numbered 0 to 2")),
    "unknown-head": ("bert", [(2, 4)], says("(2, 4) does not exist", "layer.2.attention.self", "heads 0 to 3")),
    "negative-head": ("bert", [(0, -1)], says("(0, -1) does not exist", "heads 0 to 3")),
    "second-of-two": ("bert", [(0, 0), (1, 9)], says("(1, 9) does not exist")),
    "repeated": ("bert", [(0, 1), (1, 1), (0, 1)], says("(0, 1) is listed more than once", "list every head once")),
    "part-of-a-group": (
        "llama-gqa",
        [(1, 2)],
        says("shares its KV head", "heads [2, 3] can only be removed together", "add [3]"),
    ),
    "part-of-mqa": (
        "llama-mqa",
        [(0, 0), (0, 1)],
        says("heads [0, 1, 2, 3] can only be removed together", "add [2, 3]"),
    ),
    "part-of-a-fused-group": ("phi3", [(0, 5)], says("heads [4, 5] can only be removed together", "add [4]")),
}


@pytest.mark.parametrize("case", SELECTIONS)
def test_wrong_heads(case: str) -> None:
    name, heads, message = SELECTIONS[case]
    model = ZOO[name].build()
    before = state_of(model)
    with pytest.raises(HeadSelectionError, match=message):
        headprune.remove(model, heads)
    assert_unchanged(model, before)


def test_a_head_that_is_gone() -> None:
    model = ZOO["bert"].build()
    headprune.remove(model, [(0, 1), *flat(headprune.resolve(model)[2].units())])
    before = state_of(model)
    for head in ((0, 1), (2, 3)):  # from a sliced site, and from one that is gone
        with pytest.raises(HeadSelectionError, match=says(f"Head {head} has been removed already; leave it out")):
            headprune.remove(model, [(1, 1), head])
    assert_unchanged(model, before)


class NotOurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


CALLS = {
    "resolve": headprune.resolve,
    "remove": lambda model: headprune.remove(model, [(0, 0)]),
    "gated": lambda model: headprune.gated(model, torch.ones(1, 1)).__enter__(),
    "save": lambda model: headprune.save(model, "somewhere"),
}


@pytest.mark.parametrize("call", CALLS)
def test_not_a_transformers_model(call: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = NotOurs()
    before = state_of(model)
    kind, words = (
        (CheckpointError, "writes transformers models") if call == "save" else (UnsupportedModelError, "NotOurs")
    )
    with pytest.raises(kind, match=says(words)):
        CALLS[call](model)
    assert_unchanged(model, before)
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_model() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(ZOO["bert"].build(), peft.LoraConfig(target_modules=["query"], r=2))
    with pytest.raises(UnsupportedModelError, match=says("PeftModel", "merge_and_unload()")):
        headprune.remove(model, [(0, 0)])
    inner = model.get_base_model()  # a transformers model, but with adapters where projections were
    before = state_of(inner)
    with pytest.raises(UnsupportedModelError, match=says("layer.0.attention.self.query is a", "merge the adapter")):
        headprune.remove(inner, [(0, 0)])
    assert_unchanged(inner, before)
    headprune.remove(model.merge_and_unload(), [(0, 0)])


def test_a_norm_across_heads_is_named() -> None:
    """OLMo-2 normalises queries over all heads: without one of them, all the others change."""
    model = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**GQA)).eval()
    before = state_of(model)
    message = says("'olmo2'", "stopped at model.layers.0.self_attn (Olmo2Attention)", "q_norm normalises across heads")
    with pytest.raises(UnsupportedModelError, match=message):
        headprune.remove(model, [(1, 0), (1, 1)])
    assert_unchanged(model, before)


@pytest.mark.usefixtures("clean_table")
def test_a_norm_across_heads_of_a_registered_family_can_be_gated_but_not_removed() -> None:
    """Whoever registers it may still switch heads off."""
    layout = headprune.Layout("self_attn", "q_proj", "k_proj", "v_proj", "o_proj")
    headprune.register_family("olmo2", model_types=["olmo2"], layouts=[layout], stack="decoder")
    model = transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**GQA)).eval()
    batch, before = ZOO["llama"].batch(0), state_of(model)
    message = says("Heads of site 1 (model.layers.1.self_attn)", "q_norm normalises across heads", "only gating works")
    with pytest.raises(UnsupportedModelError, match=message):
        headprune.remove(model, [(1, 0), (1, 1)])
    assert_unchanged(model, before)
    gates = torch.ones(3, 6)
    gates[1, :2] = 0.0
    plain = outputs(model, batch)
    with headprune.gated(model, gates):
        assert not identical(plain, outputs(model, batch))


def test_a_model_without_attention() -> None:
    model = transformers.ResNetModel(
        transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], num_channels=3)
    )
    with pytest.raises(UnsupportedModelError, match=says("'resnet'", "ResNetModel itself, which has no attention")):
        headprune.resolve(model)


@pytest.mark.usefixtures("clean_table")
def test_a_table_with_a_head_axis_that_a_registered_family_does_not_know() -> None:
    layout = headprune.Layout("SelfAttention", "q", "k", "v", "o")
    headprune.register_family("umt5", model_types=["umt5"], layouts=[layout], head_dim="key_value_proj_dim")
    settings = {"vocab_size": VOCAB, "d_model": 24, "d_kv": 5, "num_heads": 4, "num_layers": 1, "d_ff": 20}
    model = transformers.UMT5EncoderModel(transformers.UMT5Config(**settings))
    before = state_of(model)
    with pytest.raises(
        UnsupportedModelError, match=says("relative_attention_bias has a head axis", "only gating works")
    ):
        headprune.remove(model, [(0, 0)])
    assert_unchanged(model, before)


def test_a_record_that_does_not_belong_to_the_weights() -> None:
    model = ZOO["bert"].build()
    model.config.pruned_heads = {"0": [7]}
    with pytest.raises(UnsupportedModelError, match=says("lists head 7 for site 0", "does not match the weights")):
        headprune.resolve(model)


GATES = {
    "a-list": ([[1.0] * 4] * 3, says("floating-point tensor of shape [3, 4], not a list")),
    "whole-numbers": (torch.ones(3, 4, dtype=torch.long), says("floating-point tensor", "not a torch.int64 tensor")),
    "a-mask": (torch.ones(3, 4, dtype=torch.bool), says("floating-point tensor", "not a torch.bool tensor")),
    "transposed": (torch.ones(4, 3), says("shape [3, 4] (sites x heads)", "not [4, 3]")),
    "one-row": (torch.ones(4), says("shape [3, 4]", "not [4]")),
    "four-axes": (torch.ones(1, 1, 3, 4), says("shape [3, 4]", "or one such row per sample", "not [1, 1, 3, 4]")),
    "too-few-heads": (torch.ones(3, 3), says("shape [3, 4]", "not [3, 3]")),
}


@pytest.mark.parametrize("case", GATES)
def test_wrong_gates(case: str) -> None:
    gates, message = GATES[case]
    model = ZOO["bert"].build()
    before = state_of(model)
    with pytest.raises(GateError, match=message), headprune.gated(model, gates):
        pytest.fail("the block must not be entered")
    assert_unchanged(model, before)


def test_gates_for_another_number_of_samples() -> None:
    model = ZOO["bert"].build()
    before = state_of(model)
    with (
        pytest.raises(GateError, match=says("gates for 5 samples", "layer.0.attention.self", "a batch of 3")),
        headprune.gated(model, torch.ones(5, 3, 4)),
    ):
        outputs(model, ZOO["bert"].batch(0))
    assert_unchanged(model, before)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "llama-gqa", "phi3"])
def test_a_wrong_slice_is_found_by_verify_and_undone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the rows of another head had been cut out: same shapes, other numbers."""
    entry = ZOO[name]
    model, batch = entry.build(), entry.batch(1)
    gone = flat(headprune.resolve(model)[0].units()[:1]) + flat(headprune.resolve(model)[1].units())
    before, expected = state_of(model), outputs(model, batch)
    columns = {f"{site.o}.weight" for site in headprune.resolve(model)}
    right = headprune.units.slicing.slices.Slices.add

    def wrong(self: Any, tensor: str, dim: int, selected: list[int]) -> None:
        right(self, tensor, dim, [column - min(selected) for column in selected] if tensor in columns else selected)

    monkeypatch.setattr(headprune.units.slicing.slices.Slices, "add", wrong)
    with pytest.raises(EquivalenceError, match=says("changed the outputs by up to", "allowed", "was undone")) as error:
        headprune.remove(model, gone, verify=batch)
    assert error.value.difference > 100 * error.value.tolerance
    assert_unchanged(model, before)
    assert identical(expected, outputs(model, batch))
    monkeypatch.undo()
    headprune.remove(model, gone, verify=batch)


def test_an_error_in_the_middle_of_surgery_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ZOO["bert"].build()
    headprune.remove(model, [(0, 0)])
    before = state_of(model)

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(headprune.units.slicing.removal, "restructure", fail)
    with pytest.raises(MemoryError):
        headprune.remove(model, [(0, 1), (1, 2)])
    assert_unchanged(model, before)


def test_a_batch_that_does_not_fit_changes_nothing() -> None:
    model = ZOO["bert"].build()
    before = state_of(model)
    with pytest.raises(ValueError, match="input_ids"):
        headprune.remove(model, [(0, 0)], verify={"attention_mask": torch.ones(1, 3)})
    assert_unchanged(model, before)


LAYOUT = headprune.Layout("attn", "q", "k", "v", "o")
REGISTRATIONS = {
    "no-name": (("", ["new"], [LAYOUT]), {}, says("needs a name, at least one model type and at least one Layout")),
    "no-types": (("new", [], [LAYOUT]), {}, says("at least one model type")),
    "no-layouts": (("new", ["new"], []), {}, says("at least one Layout")),
    "one-string": (("new", "new", [LAYOUT]), {}, says("must be a list of names, such as ['new'], not one string")),
    "taken-name": (("bert", ["new"], [LAYOUT]), {}, says("named 'bert' exists already; choose another name")),
    "taken-type": (("new", ["roberta"], [LAYOUT]), {}, says("Model type 'roberta' belongs to family 'bert' already")),
    "near-quirk": (("new", ["new"], [LAYOUT]), {"quirk": "blom"}, says("no quirk 'blom'; did you mean 'bloom'?")),
    "odd-quirk": (("new", ["new"], [LAYOUT]), {"quirk": "???"}, says("no quirk '???'; known: albert, bloom")),
}


@pytest.mark.parametrize("case", REGISTRATIONS)
def test_wrong_registrations(case: str, clean_table: None) -> None:
    (name, model_types, layouts), options, message = REGISTRATIONS[case]
    before = list(families.FAMILIES)
    with pytest.raises(RegistrationError, match=message):
        headprune.register_family(name, model_types=model_types, layouts=layouts, **options)
    assert before == families.FAMILIES


def test_every_error_is_of_one_kind_and_one_sentence() -> None:
    """The command line turns that kind into exit code 2; the selection errors are ValueErrors as well."""
    model = ZOO["bert"].build()
    with pytest.raises(HeadpruneError) as error:
        headprune.remove(model, [(9, 9)])
    assert isinstance(error.value, ValueError)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(".")
