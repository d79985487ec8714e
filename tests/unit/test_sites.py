"""Where the heads are: what `resolve` says about each family of the table, before and after heads have gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import headprune
from headprune.units import supported_model_types
from headprune.units.members import Head
from helpers import all_units, families, flat
from zoo import BERT, ZOO, Entry

ENCODER, DECODER, CROSS = "encoder self", "decoder self", "decoder cross"
VISION, TEXT = "vision self", "text self"
KINDS = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "distilbert", "mpnet", "modernbert"), [ENCODER] * 3),
    **dict.fromkeys(("deberta-v2", "deberta-v3", "camembert"), [ENCODER] * 3),
    "albert": [ENCODER],
    "bert-decoder-cross": [DECODER, CROSS] * 3,
    "gpt2-cross": [DECODER, CROSS] * 2,
    **dict.fromkeys(("gpt2", "gpt-neox", "opt", "bloom", "llama", "llama-gqa", "llama-mqa"), [DECODER] * 3),
    **dict.fromkeys(("mistral", "qwen2", "qwen3", "gemma2", "phi3", "granite", "all-attention"), [DECODER] * 3),
    **dict.fromkeys(("t5", "mt5", "bart", "whisper", "marian"), [ENCODER] * 2 + [DECODER, CROSS] * 2),
    "vit": [VISION] * 3,
    "clip": [VISION] * 2 + [TEXT] * 2,
    "clip-text": [TEXT] * 2,
    **dict.fromkeys(("clip-vision", "siglip-vision"), [VISION] * 2),
}
TABLE = [
    "bert",
    "roberta",
    "xlm-roberta",
    "albert",
    "electra",
    "distilbert",
    "deberta-v2",
    "mpnet",
    "modernbert",
    "gpt2",
    "gpt_neox",
    "opt",
    "bloom",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "all_attention",
    "phi3",
    "t5",
    "mt5",
    "bart",
    "whisper",
    "vit",
    "clip",
    "clip_text_model",
    "clip_vision_model",
]


def test_the_promised_families_are_in_the_table_and_the_measured_ones_are_not() -> None:
    assert set(TABLE) <= set(supported_model_types())
    measured = {entry.build().config.model_type for entry in ZOO.values() if "measured" in entry.tags}
    assert len(measured) >= 4
    assert not measured & set(supported_model_types())
    present = {entry.build().config.model_type for entry in ZOO.values() if "measured" not in entry.tags}
    assert present == set(TABLE)


@pytest.mark.parametrize("entry", families())
def test_heads_and_their_storage(entry: Entry) -> None:
    model = entry.build()
    sites = headprune.resolve(model)
    assert [site.index for site in sites] == list(range(entry.sites))
    interleaved, fused = "interleaved" in entry.tags, "fused" in entry.tags or entry.name == "gpt2-cross"
    for site in sites:
        assert (site.heads, site.kv_heads, site.head_dim) == (entry.heads, entry.kv_heads, entry.head_dim)
        assert (site.original_heads, site.group) == (entry.heads, entry.heads // entry.kv_heads)
        assert site.kept == tuple(range(entry.heads))
        assert len(site.maps) == (1 if interleaved or (fused and site.attention == "self") else 2 if fused else 3) + (
            2 * (entry.name == "deberta-v2")
        )
        assert site.axes[-1].dim == (0 if "conv1d" in entry.tags else 1)
        assert site.applications == (3 if entry.name == "albert" else 1)
        assert (site.family == "measured") == site.proven == ("measured" in entry.tags)
        assert site.obstacle == ""
        counts = {role: len(axis.units) for role, axis in site.roles.items()}
        assert counts == {"q": entry.heads, "k": entry.kv_heads, "v": entry.kv_heads}


@pytest.mark.parametrize("entry", families(without=["dinov2"]))
def test_kinds(entry: Entry) -> None:
    assert [site.place for site in headprune.resolve(entry.build())] == KINDS[entry.name]


@pytest.mark.parametrize("entry", families())
def test_projections_cover_every_row_once(entry: Entry) -> None:
    """The rows of all units, and those of all roles, are a partition of each projection's output."""
    model = entry.build()
    for site in headprune.resolve(model):
        rows: dict[str, list[int]] = {}
        for axis in site.roles.values():
            rows.setdefault(axis.tensor, []).extend(axis.indices(range(len(axis.units))))
        for axis in site.axes:
            everything = list(range(model.get_parameter(axis.tensor).shape[axis.dim]))
            assert sorted(axis.indices(range(len(axis.units)))) == everything
            assert sorted(rows.get(axis.tensor, everything)) == everything
            assert (axis.owned, axis.length) == (len(everything), len(everything))


@pytest.mark.parametrize("entry", families())
def test_a_projection_finds_its_heads_in_the_outputs(entry: Entry) -> None:
    """The indices of one head select what the family's own reshape would: the head's part of q, k and v."""
    model = entry.build()
    site = headprune.resolve(model)[0]
    for role, axis in site.roles.items():
        outputs = torch.arange(model.get_parameter(axis.tensor).shape[axis.dim])
        if "interleaved" in entry.tags:
            place = "qkv".index(role)
            expected = outputs.view(entry.heads, 3, entry.head_dim)[:, place]
        else:
            roles = [other for other in "qkv" if site.roles[other].module == axis.module]
            sizes = [entry.head_dim * (entry.heads if other == "q" else entry.kv_heads) for other in roles]
            expected = outputs.split(sizes)[roles.index(role)].view(-1, entry.head_dim)
        assert [axis.indices([head]) for head in range(len(axis.units))] == expected.tolist()
        assert axis.split(outputs).tolist() == expected.tolist()


@pytest.mark.parametrize("entry", families())
def test_units_are_heads_or_kv_groups(entry: Entry) -> None:
    group = entry.heads // entry.kv_heads
    for site in headprune.resolve(entry.build()):
        expected = [tuple(range(first, first + group)) for first in range(0, entry.heads, group)]
        assert [tuple(head.index for head in unit) for unit in site.units()] == expected
        assert all(head.site == site.index for unit in site.units() for head in unit)
        assert site.unit(entry.heads - 1) == site.units()[-1]


def test_units_after_removal_are_those_that_are_left() -> None:
    model = ZOO["llama-gqa"].build()
    headprune.remove(model, [(1, 2), (1, 3)])
    site = headprune.resolve(model)[1]
    assert site.units() == [(Head(1, 0), Head(1, 1)), (Head(1, 4), Head(1, 5))]
    assert [site.position(head) for head in site.kept] == [0, 1, 2, 3]
    assert (site.heads, site.kv_heads, site.original_heads, site.group) == (4, 2, 6, 2)


@pytest.mark.parametrize("entry", families())
def test_a_site_without_heads_is_still_listed(entry: Entry) -> None:
    model = entry.build()
    before = headprune.resolve(model)
    headprune.remove(model, flat(before[-1].units()))
    after = headprune.resolve(model)
    assert [site.path for site in after] == [site.path for site in before]
    last = after[-1]
    assert (last.heads, last.kv_heads, last.kept, last.units()) == (0, 0, (), [])
    assert (last.original_heads, last.group, last.head_dim) == (entry.heads, before[-1].group, entry.head_dim)
    assert (last.place, last.maps, last.applications) == (before[-1].place, before[-1].maps, before[-1].applications)


def test_position_projections_of_deberta_follow_their_heads() -> None:
    site = headprune.resolve(ZOO["deberta-v2"].build())[0]
    assert [path.rpartition(".")[2] for path in site.maps[3:]] == ["pos_query_proj", "pos_key_proj"]
    followers = [axis for axis in site.axes if axis.module in site.maps[3:] and axis.dim == 0]
    assert {tuple(axis.indices([1])) for axis in followers} == {tuple(range(site.head_dim, 2 * site.head_dim))}
    assert len(headprune.resolve(ZOO["deberta-v3"].build())[0].maps) == 3


def test_learned_keys_and_values_have_an_entry_of_every_head() -> None:
    site = headprune.resolve(ZOO["all-attention"].build())[0]
    learned = [axis for axis in site.axes if axis.tensor in site.memory]
    assert [axis.tensor for axis in learned] == [f"{site.path}.persistent_{name}" for name in ("keys", "values")]
    assert [(axis.dim, axis.length, axis.width) for axis in learned] == 2 * [(0, site.heads, site.group)]


def test_groups_of_albert_are_sites_of_their_own() -> None:
    config = transformers.AlbertConfig(
        **{**BERT, "embedding_size": 12, "num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2}
    )
    sites = headprune.resolve(transformers.AlbertModel(config))
    assert [site.applications for site in sites] == [2, 2, 2, 2]


def encoder_decoder() -> Any:
    """A model of two families with other head counts: the mask is ragged."""
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**BERT), transformers.BertConfig(**{**BERT, "num_attention_heads": 3})
    )
    torch.manual_seed(0)
    return transformers.EncoderDecoderModel(config).eval()


def test_sites_with_other_head_counts_share_a_padded_mask() -> None:
    from headprune.units.members import kept_mask

    model = encoder_decoder()
    sites = headprune.resolve(model)
    assert [site.heads for site in sites] == [4] * 3 + [3] * 6
    assert [site.place for site in sites] == [ENCODER] * 3 + [DECODER, CROSS] * 3
    headprune.remove(model, [(0, 3), (4, 2)])
    mask = kept_mask(headprune.resolve(model))
    assert mask.shape == (9, 4)
    assert mask.sum().item() == 3 * 4 + 6 * 3 - 2
    assert not mask[3:, 3].any()
    with pytest.raises(headprune.HeadpruneError, match=r"\(3, 3\) does not exist"):
        headprune.remove(model, [(3, 3)])


def test_all_units_are_all_heads() -> None:
    for entry in ZOO.values():
        heads = flat(all_units(headprune.resolve(entry.build())))
        assert heads == [(site, head) for site in range(entry.sites) for head in range(entry.heads)]
