"""Families that are not in the table: measured, refused where heads cannot be told apart, or registered."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import headprune
from headprune.errors import EquivalenceError, UnsupportedModelError
from helpers import (
    MATTERS,
    TOLERANCE,
    all_units,
    assert_unchanged,
    difference,
    first_site_and_some,
    flat,
    gated_outputs,
    gates_without,
    outputs,
    some_heads,
    state_of,
)
from zoo import BART, BERT, GQA, VISION, VOCAB, ZOO, decoder_batch, image_batch, seq2seq_batch, spread, text_batch

Builder = Callable[[], Any]


def audio_batch(seed: int) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(2, 2400, generator=torch.Generator().manual_seed(seed))}


def builder(name: str, model: str, settings: dict[str, Any]) -> Builder:
    def build() -> Any:
        config = getattr(transformers, f"{name}Config")(**settings)
        torch.manual_seed(0)
        made = getattr(transformers, f"{name}{model}")(config).eval()
        spread(made)
        return made

    return build


EXPERTS = {**GQA, "num_local_experts": 2, "num_experts_per_tok": 2}
PLAIN = {k: v for k, v in GQA.items() if k not in ("head_dim", "num_key_value_heads")}
SPEECH = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (20, 10),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
MEASURED = {
    "ernie": (builder("Ernie", "Model", BERT), text_batch),
    "roformer": (builder("RoFormer", "Model", BERT), text_batch),
    "cohere": (builder("Cohere", "ForCausalLM", GQA), decoder_batch),
    "phi": (builder("Phi", "ForCausalLM", PLAIN), decoder_batch),
    "gptj": (builder("GPTJ", "ForCausalLM", {**PLAIN, "rotary_dim": 2}), decoder_batch),
    "starcoder2": (builder("Starcoder2", "ForCausalLM", GQA), decoder_batch),
    "mixtral": (builder("Mixtral", "ForCausalLM", EXPERTS), decoder_batch),
    "deit": (builder("DeiT", "Model", VISION), image_batch),
    "wav2vec2": (builder("Wav2Vec2", "Model", SPEECH), audio_batch),
    "pegasus": (builder("Pegasus", "ForConditionalGeneration", BART), seq2seq_batch),
    "persimmon": (builder("Persimmon", "ForCausalLM", PLAIN), decoder_batch),  # q, k and v rows side by side
    "gpt-oss": (builder("GptOss", "ForCausalLM", EXPERTS), decoder_batch),  # a sink for every head
    "data2vec-vision": (builder("Data2VecVision", "Model", VISION), image_batch),
    "data2vec-vision-tables": (
        builder("Data2VecVision", "Model", {**VISION, "use_relative_position_bias": True}),
        image_batch,
    ),
    "data2vec-vision-shared-table": (
        builder("Data2VecVision", "Model", {**VISION, "use_shared_relative_position_bias": True}),
        image_batch,
    ),
}


def check_exact(build: Builder, batch: dict[str, torch.Tensor], heads: list[tuple[int, int]]) -> None:
    dense, model = build(), build()
    expected = gated_outputs(dense, batch, gates_without(headprune.resolve(dense), heads))
    assert difference(expected, outputs(dense, batch)) > MATTERS
    headprune.remove(model, heads)
    assert difference(expected, outputs(model, batch)) <= TOLERANCE


@pytest.mark.parametrize("choose", [some_heads, first_site_and_some])
@pytest.mark.parametrize("name", MEASURED)
def test_what_was_measured_is_exact(name: str, choose: Callable[..., Any]) -> None:
    build, batch = MEASURED[name]
    actual = headprune.survey(build())
    assert (actual.known_by, actual.left) == ("experiment", ())
    assert {(site.family, site.obstacle) for site in actual.sites} == {("measured", "")}
    check_exact(build, batch(1), choose(actual.sites))


REFUSED = {
    "olmo2": (
        builder("Olmo2", "ForCausalLM", GQA),
        "model.layers.0.self_attn (Olmo2Attention): q_norm normalises across heads, so every head depends on all the",
    ),
    # It cuts what it is given into as many pieces as it has heads.
    "wavlm": (builder("WavLM", "Model", SPEECH), "encoder.layers.0.attention (WavLMAttention): "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_be_exact_is_refused(name: str) -> None:
    build, reason = REFUSED[name]
    model = build()
    before = state_of(model)
    with pytest.raises(UnsupportedModelError, match=re.escape(f"stopped at {reason}")):
        headprune.remove(model, [(0, 0)])
    assert_unchanged(model, before)


def persimmon() -> Any:
    return builder("Persimmon", "ForCausalLM", PLAIN)()


@pytest.mark.usefixtures("clean_table")
def test_registering_an_interleaved_family() -> None:
    """Persimmon stores the rows of q, k and v head by head; whoever says so is believed, and nothing is measured."""
    assert headprune.survey(persimmon()).known_by == "experiment"
    headprune.register_family(
        "persimmon",
        model_types=["persimmon"],
        layouts=[headprune.Layout("self_attn", *("query_key_value",) * 3, "dense", interleaved=True)],
        stack="decoder",
    )
    sites = headprune.resolve(persimmon())
    assert {(site.family, site.place) for site in sites} == {("persimmon", "decoder self")}
    width = sites[0].head_dim
    assert sites[0].roles["k"].indices([2]) == list(range(7 * width, 8 * width))
    for heads in (some_heads(sites), flat(sites[1].units()), flat(all_units(sites)[1:])):
        check_exact(persimmon, decoder_batch(1), heads)


@pytest.mark.usefixtures("clean_table")
def test_a_wrong_registration_is_found_when_the_removal_is_verified() -> None:
    """Block after block instead of head by head: the shapes agree, the numbers do not."""
    headprune.register_family(
        "wrong", model_types=["persimmon"], layouts=[headprune.Layout("self_attn", *("query_key_value",) * 3, "dense")]
    )
    model = persimmon()
    before = state_of(model)
    with pytest.raises(EquivalenceError, match="changed the outputs by up to"):
        headprune.remove(model, [(0, 1)])
    assert_unchanged(model, before)


class RenamedAttention(nn.Module):
    """Attention under names that nobody else uses."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.per_head = width // count
        self.asks, self.offers, self.tells = (nn.Linear(width, width) for _ in range(3))
        self.joins = nn.Linear(width, width)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part(hidden_states).unflatten(-1, (-1, self.per_head)).transpose(1, 2)
            for part in (self.asks, self.offers, self.tells)
        )
        return self.joins(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class RenamedConfig(transformers.PreTrainedConfig):
    model_type = "renamed"


class RenamedModel(transformers.PreTrainedModel):
    config_class = RenamedConfig

    def __init__(self, config: RenamedConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(VOCAB, 24)
        self.rooms = nn.ModuleList(RenamedAttention(24, 4) for _ in range(2))
        self.post_init()

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> dict[str, torch.Tensor]:
        hidden = self.embeddings(input_ids)
        for room in self.rooms:
            hidden = hidden + room(hidden)
        return {"last_hidden_state": hidden}


class SpeechlessAttention(RenamedAttention):
    def forward(self, tea: torch.Tensor, biscuits: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return tea + biscuits


class SpeechlessModel(RenamedModel):
    """Its forward asks for what nobody thought of, so no twin of it runs."""

    def __init__(self, config: RenamedConfig) -> None:
        super().__init__(config)
        self.rooms = nn.ModuleList(SpeechlessAttention(24, 4) for _ in range(2))

    def forward(self, tea: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise NotImplementedError


def renamed() -> RenamedModel:
    torch.manual_seed(0)
    model = RenamedModel(RenamedConfig()).eval()
    spread(model)
    return model


def test_a_model_of_ones_own_is_measured_whatever_its_names() -> None:
    sites = headprune.resolve(renamed())
    assert [(site.path, site.o, site.heads, site.roles["q"].module) for site in sites] == [
        (f"rooms.{number}", f"rooms.{number}.joins", 4, f"rooms.{number}.asks") for number in range(2)
    ]
    for heads in (some_heads(sites), flat(sites[0].units())):
        check_exact(renamed, text_batch(0), heads)


def test_a_model_that_no_twin_runs_of_says_how_to_register_it() -> None:
    with pytest.raises(UnsupportedModelError, match=r"could not be measured: .* could not be run .*register_family\("):
        headprune.resolve(SpeechlessModel(RenamedConfig()))


@pytest.mark.usefixtures("clean_table")
def test_registering_a_model_of_ones_own() -> None:
    layout = headprune.Layout("0", q="asks", k="offers", v="tells", o="joins")
    family = headprune.register_family(
        "renamed",
        model_types=["renamed"],
        layouts=[layout, headprune.Layout("1", "asks", "offers", "tells", "joins")],
        head_dim="per_head",
        stack="text",
    )
    assert family.name == "renamed"
    sites = headprune.resolve(renamed())
    assert [(site.path, site.place, site.heads) for site in sites] == [
        ("rooms.0", "text self", 4),
        ("rooms.1", "text self", 4),
    ]
    check_exact(renamed, text_batch(0), some_heads(sites))
    with pytest.raises(headprune.HeadpruneError, match="belongs to family 'renamed' already"):
        headprune.register_family("other", model_types=["renamed"], layouts=[layout])


@pytest.mark.usefixtures("clean_table")
def test_a_registration_that_points_nowhere_says_where_it_stopped() -> None:
    headprune.register_family(
        "renamed", model_types=["renamed"], layouts=[headprune.Layout("0", "asks", "nothing", "tells", "joins")]
    )
    with pytest.raises(UnsupportedModelError, match=r"Stopped at rooms\.0: .* rooms\.0\.nothing is missing"):
        headprune.resolve(renamed())


@pytest.mark.usefixtures("clean_table")
def test_registering_does_not_change_other_families() -> None:
    before = headprune.resolve(ZOO["bert"].build())
    headprune.register_family("new", model_types=["new"], layouts=[headprune.Layout("attn", "q", "k", "v", "o")])
    assert headprune.resolve(ZOO["bert"].build()) == before
