"""The record of removed units, the dense model of the config and the weights agree, whenever a model is read or saved;
modules whose weights are computed are refused, and exchanged ones verified."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, remove_weight_norm, weight_norm

import headprune
from headprune.errors import CheckpointError, EquivalenceError, UnsupportedModelError
from headprune.units import all_sites
from headprune.units.dense_model import changed_module
from helpers import assert_unchanged, contents, families, identical, outputs, state_of
from zoo import ZOO, Entry

BATCH = ZOO["bert"].batch(0)


def bert() -> Any:
    return ZOO["bert"].build()


def own_config(model: Any) -> Any:
    """What the error asks for: a copy of the config without the record."""
    config = copy.deepcopy(model.config)
    config.pruned_heads = {}
    return config


def assert_saved(model: Any, folder: Path, batch: Any = BATCH, **options: Any) -> None:
    headprune.save(model, folder)
    assert identical(outputs(headprune.load(folder, **options), batch), outputs(model, batch))


# --- one config, two models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("built", ["before", "after"])
def test_two_models_of_one_config(built: str, tmp_path: Path) -> None:
    """The second had lost another head than it was told to, and its checkpoint could not be loaded."""
    model = bert()
    second = type(model)(model.config).eval() if built == "before" else None
    headprune.remove(model, [(0, 1)])
    second = type(model)(model.config).eval() if second is None else second
    before = state_of(second)
    message = r"config\.pruned_heads lists 1 head of site 0 .* has 4 of the 4 heads .* config with pruned_heads = {}\.$"
    for use in (
        headprune.resolve,
        lambda m: headprune.remove(m, [(0, 2)]),
        lambda m: headprune.save(m, tmp_path / "no"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            use(second)
    assert_unchanged(second, before)
    assert contents(tmp_path) == {}
    assert_saved(model, tmp_path / "first")
    third = type(model)(own_config(model)).eval()
    headprune.remove(third, [(0, 2)])
    assert headprune.resolve(third)[0].kept == (0, 1, 3)
    assert headprune.resolve(model)[0].kept == (0, 2, 3)
    assert_saved(third, tmp_path / "third")


def test_neurons_of_two_models_of_one_config() -> None:
    model = bert()
    (first, *_) = [site.index for site in all_sites(model) if site.kind == "neurons"]
    second = type(model)(model.config)
    headprune.remove(model, neurons=[(first, 3)])
    with pytest.raises(
        UnsupportedModelError, match=r"config\.pruned_neurons lists 1 neuron of site .*pruned_neurons = {}"
    ):
        all_sites(second)


def test_as_many_heads_but_others() -> None:
    model = bert()
    second = type(model)(model.config)
    headprune.remove(model, [(0, 1)])
    model.config.pruned_heads = {}
    headprune.remove(second, [(0, 2)])
    with pytest.raises(UnsupportedModelError, match=r"says that heads \[0, 1, 3\] of site 0 .* but it has \[0, 2, 3\]"):
        headprune.resolve(model)


def test_copies_are_models_of_their_own(tmp_path: Path) -> None:
    model = bert()
    headprune.remove(model, [(0, 1)])
    copied = copy.deepcopy(model)
    headprune.remove(copied, [(0, 2)])
    headprune.remove(model, [(1, 3)])
    assert (headprune.resolve(copied)[0].kept, headprune.resolve(copied)[1].kept) == ((0, 3), (0, 1, 2, 3))
    assert (headprune.resolve(model)[0].kept, headprune.resolve(model)[1].kept) == ((0, 2, 3), (0, 1, 2))
    assert_saved(copied, tmp_path / "copied")
    assert_saved(model, tmp_path / "model")


# --- parts of models -------------------------------------------------------------------------------------------------


def test_a_part_with_the_config_of_the_whole_has_its_record(tmp_path: Path) -> None:
    model = bert()
    headprune.remove(model.bert, [(0, 1)])
    headprune.remove(model, [(0, 2)])
    assert headprune.resolve(model.bert)[0].kept == headprune.resolve(model)[0].kept == (0, 3)
    assert_saved(model, tmp_path / "whole")
    assert_saved(model.bert, tmp_path / "part")


PARTS: dict[str, tuple[str, str]] = {"t5": ("encoder", "encoder"), "bart": ("model.decoder", "model.encoder")}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_pruned_then_the_whole(name: str, tmp_path: Path) -> None:
    """T5's stacks have copies of the config; BART's share it, and number their sites from 0."""
    model = ZOO[name].build()
    headprune.remove(model.get_submodule(PARTS[name][0]), [(0, 1)])
    before = state_of(model)
    for use in (lambda: headprune.remove(model, [(0, 2)]), lambda: headprune.save(model, tmp_path / "model")):
        with pytest.raises(UnsupportedModelError, match=r"config\.pruned_heads lists (no heads|1 head) of site 0"):
            use()
    assert_unchanged(model, before)
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("name", PARTS)
def test_the_whole_is_pruned_then_a_part(name: str, tmp_path: Path) -> None:
    model, part = ZOO[name].build(), PARTS[name][1]
    headprune.remove(model, [(0, 1), (len(headprune.resolve(model)) - 1, 0)])
    for use in (lambda m: headprune.remove(m, [(0, 2)]), lambda m: headprune.save(m, tmp_path / "model")):
        with pytest.raises(UnsupportedModelError, match=r"config\.pruned_heads lists (no heads|heads) of site"):
            use(model.get_submodule(part))
    assert contents(tmp_path) == {}
    assert_saved(model, tmp_path / "model", ZOO[name].batch(0))


class Wrapper(nn.Module):
    """A user's module around a transformers model, with its config."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config
        self.head = nn.Linear(inner.config.hidden_size, 3)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(input_ids=input_ids).last_hidden_state)


def test_a_module_around_a_model(tmp_path: Path) -> None:
    model = Wrapper(bert().bert).eval()
    headprune.remove(model, [(0, 1)])
    copied = copy.deepcopy(model)
    headprune.remove(copied, [(0, 2)])
    assert [headprune.resolve(each)[0].kept for each in (model, copied)] == [(0, 2, 3), (0, 3)]
    with pytest.raises(UnsupportedModelError, match=r"lists no heads of site 0 .* has 3 of the 4 heads"):
        headprune.save(model.inner, tmp_path / "model")
    assert contents(tmp_path) == {}
    around = Wrapper(bert().bert).eval()
    headprune.remove(around.inner, [(0, 1)])
    with pytest.raises(UnsupportedModelError, match="units were removed from a part of this model"):
        headprune.remove(around, [(0, 0)])
    assert_saved(around.inner, tmp_path / "inner")


class OwnConfig(transformers.BertConfig):
    model_type = "record-test-bert"


class OwnModel(transformers.PreTrainedModel):
    """A class and a model_type that transformers does not have."""

    config_class = OwnConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert, self.head = transformers.BertModel(config), nn.Linear(config.hidden_size, 2)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state)}


def test_a_class_that_transformers_does_not_have_is_loaded_by_naming_it(tmp_path: Path) -> None:
    settings = {name: value for name, value in bert().config.to_dict().items() if name != "model_type"}
    model = OwnModel(OwnConfig(**settings)).eval()
    headprune.remove(model, [(0, 1)])
    batch = {name: BATCH[name] for name in ("input_ids", "attention_mask")}
    assert_saved(model, tmp_path / "model", batch, model_class=OwnModel)
    with pytest.raises(
        CheckpointError, match="no model_type 'record-test-bert'; pass the class of the model as model_class"
    ):
        headprune.load(tmp_path / "model")


# --- what could not be loaded is not saved ---------------------------------------------------------------------------


def test_the_base_of_an_adapter_is_not_saved(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    for target in ("classifier", "intermediate.dense"):
        model = bert()
        headprune.remove(model, [(0, 1)])
        adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=[target]))
        with pytest.raises(CheckpointError, match=r"could not be loaded.*; merge the adapter first\.$"):
            headprune.save(adapted.get_base_model(), tmp_path / "no")
        assert contents(tmp_path) == {}
    assert_saved(adapted.merge_and_unload(), tmp_path / "merged")


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "classifier": (
        lambda m: setattr(m, "classifier", nn.Linear(m.config.hidden_size, 7)),
        r"classifier\.weight has the shape \(7, 24\) and not \(3, 24\); make its config and its modules match",
    ),
    "layers": (
        lambda m: setattr(m.bert.encoder, "layer", m.bert.encoder.layer[:2]),
        r"the model has no bert\.encoder\.layer\.2\.",
    ),
    "more": (lambda m: setattr(m, "extra", nn.Linear(2, 2)), r"extra\.weight is not a part of it"),
    "masked": (
        lambda m: prune.l1_unstructured(m.classifier, "weight", 0.5),
        r"classifier: its weight is computed .*prune\.remove\(module, 'weight'\)",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_do_not_match_the_config_are_not_saved(change: str, tmp_path: Path) -> None:
    model = bert()
    headprune.remove(model, [(0, 1)])
    CHANGES[change][0](model)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=CHANGES[change][1]):
        headprune.save(model, tmp_path / "no")
    assert contents(tmp_path) == {}


def test_fewer_layers_by_the_config_too_are_saved(tmp_path: Path) -> None:
    model = bert()
    model.bert.encoder.layer = model.bert.encoder.layer[:2]
    model.config.num_hidden_layers = 2
    headprune.remove(model, [(1, 1)])
    assert_saved(model, tmp_path / "model")


# --- weights that are computed ---------------------------------------------------------------------------------------


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


COMPUTED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "mask": (
        lambda module: prune.l1_unstructured(module, "weight", 0.5),
        lambda module: prune.remove(module, "weight"),
        r"torch\.nn\.utils\.prune\.remove",
    ),
    "old weight_norm": (weight_norm, remove_weight_norm, r"torch\.nn\.utils\.remove_weight_norm"),
    "weight_norm": (
        parametrizations.weight_norm,
        lambda module: parametrize.remove_parametrizations(module, "weight"),
        r"torch\.nn\.utils\.parametrize\.remove_parametrizations",
    ),
    "parametrization": (
        lambda module: parametrize.register_parametrization(module, "weight", Double()),
        lambda module: parametrize.remove_parametrizations(module, "weight"),
        r"torch\.nn\.utils\.parametrize\.remove_parametrizations",
    ),
}
PLACES = {
    "table": ("bert", "bert.encoder.layer.0.attention.self.query", "bert.encoder.layer.0.output.dense"),
    "discovered": ("granite", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("known_by", PLACES)
@pytest.mark.parametrize("how", COMPUTED)
def test_weights_that_are_computed_are_refused_with_the_fix(how: str, known_by: str) -> None:
    name, of_heads, of_neurons = PLACES[known_by]
    apply, undo, fix = COMPUTED[how]
    for path in (of_heads, of_neurons):
        model = ZOO[name].build()
        sites = all_sites(model)
        members = [tuple(member) for member in next(site for site in sites if path in (*site.maps, site.o)).units()[1]]
        chosen = {"heads" if path == of_heads else "neurons": members}
        apply(model.get_submodule(path))
        with pytest.raises(UnsupportedModelError, match=rf"{path}: its weight is computed .*{fix}\(module, 'weight'\)"):
            headprune.remove(model, **chosen)
        undo(model.get_submodule(path))
        expected = outputs(model, ZOO[name].batch(0))
        headprune.remove(model, **chosen)
        assert not identical(outputs(model, ZOO[name].batch(0)), expected)


def test_a_mask_in_a_module_that_is_no_transformers_model() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    prune.l1_unstructured(model.layers[0].linear1, "weight", 0.5)
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.linear1: its weight is computed .*prune\.remove"):
        headprune.resolve(model)


# --- modules that were exchanged -------------------------------------------------------------------------------------


class MixedHeads(transformers.models.bert.modeling_bert.BertSelfAttention):
    """What its heads give is normalised over all of them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        context, *rest = super().forward(*args, **kwargs)
        return (nn.functional.softmax(context, -1), *rest)


class MixedNeurons(nn.Module):
    def forward(self, neurons: torch.Tensor) -> torch.Tensor:
        return nn.functional.softmax(neurons, -1)


def exchanged_attention(model: Any) -> None:
    for layer in model.bert.encoder.layer:
        layer.attention.self.__class__ = MixedHeads


def exchanged_forward(model: Any) -> None:
    for layer in model.bert.encoder.layer:
        forward = layer.intermediate.forward
        layer.intermediate.forward = lambda states, forward=forward: nn.functional.softmax(forward(states), -1)


def exchanged_activation(model: Any) -> None:
    for layer in getattr(model, "model", model).layers:
        layer.mlp.act_fn = MixedNeurons()


def hooked(model: Any) -> None:
    for layer in model.bert.encoder.layer:
        layer.intermediate.register_forward_hook(lambda _, args, output: nn.functional.softmax(output, -1))


EXCHANGED: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "attention": ("bert", exchanged_attention, "heads"),
    "forward": ("bert", exchanged_forward, "neurons"),
    "hook": ("bert", hooked, "neurons"),
    "activation": ("llama-gqa", exchanged_activation, "neurons"),
    "activation of a discovered layout": ("granite", exchanged_activation, "neurons"),
}


@pytest.mark.parametrize("what", EXCHANGED)
def test_a_proof_of_the_class_does_not_serve_for_exchanged_modules(what: str) -> None:
    name, exchange, kind = EXCHANGED[what]
    model = ZOO[name].build()
    site = next(site for site in all_sites(model) if site.kind == kind)
    members = {kind: [tuple(member) for unit in site.units()[1:2] for member in unit]}
    headprune.remove(copy.deepcopy(model), **members)  # proven for the class
    exchange(model)
    assert changed_module(model) is not None
    before = outputs(model, ZOO[name].batch(0))
    with pytest.raises(EquivalenceError):
        headprune.remove(model, **members)
    assert identical(outputs(model, ZOO[name].batch(0)), before)
    assert not getattr(model.config, f"pruned_{kind}", None)


def test_exchanged_modules_whose_units_are_separate_are_pruned(tmp_path: Path) -> None:
    model = bert()
    model.bert.encoder.layer[0].intermediate.intermediate_act_fn = nn.Tanh()
    headprune.remove(model, [(0, 1)], neurons=[(3, 5)])
    assert (headprune.resolve(model)[0].heads, all_sites(model)[3].size) == (3, all_sites(model)[3].original - 1)


def test_prune_verifies_every_removal_from_exchanged_modules() -> None:
    """The first steps remove heads elsewhere, as those of the last layer have larger weights."""
    model = bert()
    attention = model.bert.encoder.layer[2].attention
    attention.self.__class__ = MixedHeads
    with torch.no_grad():
        for part in (attention.self.query, attention.self.key, attention.self.value, attention.output.dense):
            part.weight.mul_(3)
    removed: list[Any] = []
    with pytest.raises(EquivalenceError):
        headprune.prune(
            model,
            [ZOO["bert"].batch(seed) for seed in range(2)],
            criterion="magnitude",
            keep=2,
            repair="none",
            on_step=lambda step: removed.extend(step.removed),
        )
    assert {site for site, _ in removed} == {0, 1}


@pytest.mark.parametrize("entry", families())
def test_modules_as_the_class_builds_them_are_recognised(entry: Entry) -> None:
    """Otherwise every removal would be verified again."""
    model = entry.build()
    assert changed_module(model) is None
    outputs(model, entry.batch(0))
    assert changed_module(model) is None
    headprune.remove(model, [tuple(member) for member in headprune.resolve(model)[0].units()[0]])
    assert changed_module(model) is None
    assert changed_module(copy.deepcopy(model)) is None


def test_a_module_that_is_no_transformers_model_is_discovered_again_where_a_part_is_exchanged() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    assert len([site for site in all_sites(model) if site.kind == "neurons"]) == 2
    for layer in model.layers:
        layer.activation = MixedNeurons()
    assert not [site for site in all_sites(model) if site.kind == "neurons"]
