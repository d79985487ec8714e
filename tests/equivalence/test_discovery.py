"""Layouts that are measured: what the table says is what an experiment finds, and what it finds is cut exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from benchmarks.model_coverage import agree, build, outputs, silenced

import headprune
from headprune.discovery.attention import dense_sites, discover_sites
from headprune.discovery.twin import Run, randomise, sample_runs, small_config
from headprune.errors import UnsupportedModelError
from headprune.measure.costs import head_parameters, total_parameters
from headprune.units import families
from headprune.units.spec import ROLES, Axis, Site
from helpers import families as entries
from helpers import flat
from zoo import VOCAB, ZOO, Entry

# --- the table and the experiment -------------------------------------------------------------------------------------

COMPARED = ("o", "heads", "head_dim", "group", "kept", "original")
# What the experiment finds otherwise, or not at all, and why.
OTHERWISE: dict[str, tuple[set[str], str]] = {
    "t5": ({"missing"}, "the first sites of a stack make a position bias for all others, whose heads would be fewer"),
    "mt5": ({"missing"}, "as T5"),
    "llama-mqa": ({"group", "k", "v"}, "one key serves all heads, so each of them may go; it belongs to none of them"),
    "deberta-v3": ({"q", "k"}, "its maps of queries and keys run on positions too, so their rows have two roles"),
}


def differences(table: Sequence[Site], measured: Sequence[Site]) -> set[tuple[str, str]]:
    """(path, what) that the two say otherwise."""
    by_path = {site.path: site for site in measured}
    actual = {(path, "unknown") for path in by_path.keys() - {site.path for site in table}}
    for site in table:
        other = by_path.get(site.path)
        if other is None:
            actual.add((site.path, "missing"))
            continue
        actual |= {(site.path, name) for name in COMPARED if getattr(site, name) != getattr(other, name)}
        for role in ROLES:
            if described(site.producers.get(role)) != described(other.producers.get(role)):
                actual.add((site.path, role))
        if described(site.axes[-1]) != described(other.axes[-1]) and site.group == other.group:
            actual.add((site.path, "columns"))
    return actual


def described(axis: Axis | None) -> Any:
    """Where it is and which indices each unit has, whatever rule or table says so."""
    return axis and (axis.tensor, axis.dim, axis.length, [axis.indices([unit]) for unit in range(len(axis.units))])


def experiment(entry: Entry) -> tuple[Any, list[Site]]:
    model = entry.build().double()
    return model, dense_sites(discover_sites(model, sample_runs(model)).sites)


TABLE = [parameter for parameter in entries() if "measured" not in parameter.values[0].tags]


@pytest.mark.parametrize("entry", TABLE)
def test_the_table_says_what_an_experiment_finds(entry: Entry) -> None:
    model, measured = experiment(entry)
    allowed, _ = OTHERWISE.get(entry.name, (set(), ""))
    assert measured
    assert {what for _, what in differences(headprune.resolve(model), measured)} == allowed


def swapped(layout: families.Layout) -> families.Layout:
    return replace(layout, k=layout.v, v=layout.k)


PLANTED: dict[str, tuple[str, Callable[[families.Layout], families.Layout], set[str]]] = {
    "keys for values": ("llama-gqa", swapped, {"k", "v"}),
    "queries for keys": ("bert", lambda layout: replace(layout, q=layout.k, k=layout.q), {"q", "k"}),
    "blocks for heads side by side": ("gpt-neox", lambda layout: replace(layout, interleaved=False), {"q", "k", "v"}),
    "heads side by side for blocks": ("gpt2", lambda layout: replace(layout, interleaved=True), {"q", "k", "v"}),
    "the wrong output map": ("distilbert", lambda layout: replace(layout, o="v_lin"), {"o", "columns"}),
    "a site too few": ("bart", lambda layout: replace(layout, suffix="encoder_attn"), {"unknown"}),
}


@pytest.mark.usefixtures("clean_table")
@pytest.mark.parametrize("case", PLANTED)
def test_an_error_in_the_table_is_found(case: str) -> None:
    name, change, expected = PLANTED[case]
    model, measured = experiment(ZOO[name])
    right = families.family_of(model.config.model_type)
    assert right is not None
    wrong = replace(right, layouts=tuple(dict.fromkeys(change(layout) for layout in right.layouts)))
    families.FAMILIES[families.FAMILIES.index(right)] = wrong
    assert {what for _, what in differences(headprune.resolve(model), measured)} == expected


def test_keys_and_values_of_a_fused_map_in_the_wrong_order_are_found() -> None:
    model, measured = experiment(ZOO["phi3"])
    right = headprune.resolve(model)
    wrong = [replace(site, producers={**site.roles, "k": site.roles["v"], "v": site.roles["k"]}) for site in right]
    assert differences(right, measured) == set()
    assert differences(wrong, measured) == {(site.path, role) for site in right for role in ("k", "v")}


# --- what was measured is cut exactly ---------------------------------------------------------------------------------


def made(model_class: Any, config: Any) -> tuple[Any, list[Run]]:
    torch.manual_seed(0)
    model = model_class(config).eval()
    randomise(model, 0)
    model = model.double()
    return model, sample_runs(model)


def some_of(sites: Sequence[Site]) -> list[tuple[int, int]]:
    """Half of the units of every site that has more than one."""
    return flat(unit for site in sites for unit in site.units()[1::2])


def assert_exact(model: Any, runs: Sequence[Run], steps: Sequence[Sequence[tuple[int, int]]]) -> None:
    """After each step, outputs are those of the dense model with zeros in the columns of what has gone."""
    sites, dense, gone = headprune.resolve(model), copy.deepcopy(model), []
    plain = outputs(dense, runs)
    for heads in steps:
        gone += heads
        expected = silenced(dense, sites, gone, runs)
        assert not agree(plain, expected), "these heads do nothing"
        headprune.remove(model, heads)
        assert agree(expected, outputs(model, runs))
    assert [set(site.kept) for site in headprune.resolve(model)] == [
        set(site.kept) - {head for place, head in gone if place == site.index} for site in sites
    ]


def assert_reloads(model: Any, runs: Sequence[Run], folder: Path) -> None:
    loaded: Any = headprune.load(headprune.save(model, folder), dtype=model.dtype).eval()
    if hasattr(loaded, "set_experts_implementation"):
        loaded.set_experts_implementation("eager")
    assert agree(outputs(model, runs), outputs(loaded, runs))
    assert [site.kept for site in headprune.resolve(loaded)] == [site.kept for site in headprune.resolve(model)]


def prune_and_reload(model: Any, runs: Sequence[Run], folder: Path) -> headprune.units.resolve.Survey:
    """Half of the units, then a whole site, then a checkpoint."""
    actual = headprune.survey(model)
    assert {site.family for site in actual.sites} == {"measured"}
    half = some_of(actual.sites)
    first = next(site for site in actual.sites if site.needs.empty)
    rest = [head for head in flat(first.units()) if head not in half]
    assert_exact(model, runs, [heads for heads in (half, rest) if heads])
    assert_reloads(model, runs, folder)
    return actual


TYPES = {
    "text": ["gptj", "gpt_neo", "gpt_bigcode", "codegen", "mpt", "esm", "luke", "layoutlmv3"],
    "vision": ["beit", "timesformer"],
    "audio": ["wav2vec2"],
    "vision-language": ["qwen2_vl", "gemma3"],
    "detection": ["detr"],
    "experts": ["mixtral", "qwen3_moe", "gpt_oss"],
    "compressed keys": ["deepseek_v3"],
    "hybrid": ["jamba"],
}


@pytest.mark.parametrize(("kind", "model_type"), [(kind, name) for kind, names in TYPES.items() for name in names])
def test_a_small_model_of_many_types(kind: str, model_type: str, tmp_path: Path) -> None:
    model, runs = build(model_type)
    actual = prune_and_reload(model, runs, tmp_path / "model")
    assert actual.known_by == "experiment"
    assert actual.left == ()


FALCON = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LAYOUTS: dict[str, tuple[dict[str, Any], int]] = {
    "one key for all": ({"multi_query": True}, 1),
    "a key for each": ({"multi_query": False}, 1),
    "a key for two": ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_all_layouts_of_falcon(case: str, tmp_path: Path) -> None:
    settings, group = LAYOUTS[case]
    config = transformers.FalconConfig(**FALCON, **settings)
    model, runs = made(transformers.FalconForCausalLM, config)
    actual = prune_and_reload(model, runs, tmp_path / "model")
    assert {(site.original, site.group, len(site.maps)) for site in actual.sites} == {(4, group, 1)}


def test_pairs_of_diffllama_are_units(tmp_path: Path) -> None:
    """The maps of two heads are subtracted from one another: without one of them the other means nothing."""
    model, runs = build("diffllama")
    sites = headprune.resolve(model)
    declared = model.config.num_attention_heads
    assert {(site.original, site.width) for site in sites} == {(declared // 2, 2 * model.config.head_dim)}
    dense = total_parameters(model)
    claimed = sum(head_parameters(model, site) for site in sites)
    assert_exact(model, runs, [some_of(sites), flat(sites[0].units()[::2])])
    assert_reloads(model, runs, tmp_path / "model")
    headprune.remove(model, flat(headprune.resolve(model)[1].units()))
    assert dense - total_parameters(model) == claimed


def test_blocks_of_codegen_lose_a_head_each(tmp_path: Path) -> None:
    """Its code deals heads out to four blocks, so that one of each goes at a time."""
    config = transformers.CodeGenConfig(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=8, n_positions=40, n_ctx=40, rotary_dim=4, n_inner=20
    )
    model, runs = made(transformers.CodeGenForCausalLM, config)
    actual = prune_and_reload(model, runs, tmp_path / "model")
    assert {(site.original, site.group) for site in actual.sites} == {(8, 4)}


def test_relative_tables_of_swin_lose_their_heads(tmp_path: Path) -> None:
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 1], num_heads=[2, 4], window_size=4
    )
    model, runs = made(transformers.SwinModel, config)
    sites = headprune.resolve(model)
    name = "relative_position_bias.relative_position_bias_table"
    assert all([a.tensor for a in site.axes if "relative" in a.module] == [f"{site.path}.{name}"] for site in sites)
    before = [model.get_submodule(site.path).get_parameter(name).clone() for site in sites]
    half = some_of(sites)
    assert_exact(model, runs, [half])
    for site, dense in zip(headprune.resolve(model), before, strict=True):
        assert torch.equal(model.get_submodule(site.path).get_parameter(name), dense[:, list(site.kept)])
    assert_exact(model, runs, [flat(headprune.resolve(model)[0].units())])
    assert_reloads(model, runs, tmp_path / "model")


def test_sinks_of_gpt_oss_lose_their_heads() -> None:
    model, _ = build("gpt_oss")
    site = headprune.resolve(model)[0]
    module = model.get_submodule(site.path)
    before = module.sinks.clone()
    headprune.remove(model, site.units()[0])
    assert torch.equal(module.sinks, before[list(headprune.resolve(model)[0].kept)])


def test_a_norm_across_heads_is_named() -> None:
    model, _ = build("olmo2")
    with pytest.raises(UnsupportedModelError, match=r"stopped at layers.0.self_attn \(Olmo2Attention\): q_norm"):
        headprune.resolve(model)


def test_a_map_that_no_input_reached_is_named() -> None:
    """Longformer's global attention has maps of its own, whose heads would stay when the others go."""
    model, _ = build("longformer")
    with pytest.raises(UnsupportedModelError, match="its map query_global did not run on the inputs that were tried"):
        headprune.resolve(model)


def test_attention_that_cannot_be_cut_is_left_whole_and_listed() -> None:
    actual = headprune.survey(build("led")[0])
    assert {path.split(".")[0] for path, _ in actual.left} == {"encoder"}
    assert {site.path.split(".")[0] for site in actual.sites} == {"decoder"}
    assert {site.attention for site in actual.sites} == {"self", "cross"}


# --- a model that sees and speaks -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llava() -> tuple[Any, list[Run]]:
    config = small_config(transformers.LlavaConfig(), keep_heads=False, depth=2)
    return made(transformers.LlavaForConditionalGeneration, config)


@pytest.mark.parametrize("towers", [("language_model",), ("vision_tower",), ("language_model", "vision_tower")])
def test_heads_of_either_tower_of_llava(towers: tuple[str, ...], llava: Any, tmp_path: Path) -> None:
    dense, runs = llava
    model = copy.deepcopy(dense)
    sites = [site for site in headprune.resolve(model) if any(tower in site.path for tower in towers)]
    assert len(sites) == 2 * len(towers)
    heads = some_of(sites)
    whole = [head for head in flat(sites[0].units()) if head not in heads]
    assert_exact(model, runs, [heads, whole])
    assert_reloads(model, runs, tmp_path / "model")

    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    gates = torch.ones(len(headprune.resolve(dense)), 4, dtype=torch.float64)
    for head in [*heads, *whole]:
        gates[head] = 0.0
    with headprune.gated(dense, gates):
        expected = dense.generate(**runs[0].inputs, **options)
    given = model.generate(**runs[0].inputs, **options)
    assert torch.equal(given.sequences, expected.sequences)
    assert agree(list(expected.logits), list(given.logits))
