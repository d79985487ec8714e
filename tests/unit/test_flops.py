"""FLOPs against torch's own counter on a real forward pass, before and after heads go."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

import headprune
from headprune.measure import costs, flop_count
from headprune.measure.costs import default_tokens, flops
from helpers import all_units, assert_unchanged, families, flat, identical, outputs, some_heads, state_of
from zoo import BART, BERT, CLIP_TOWER, GQA, LABELS, VISION, VOCAB, ZOO, text_batch

TOKENS = 32
T5 = {"vocab_size": VOCAB, "d_model": 24, "d_kv": 5, "num_heads": 4, "num_layers": 2, "d_ff": 20, "pad_token_id": 1}
T5["decoder_start_token_id"] = 1
DISTIL = {"vocab_size": VOCAB, "dim": 24, "n_layers": 3, "n_heads": 4, "hidden_dim": 20, "max_position_embeddings": 40}
GPT2 = {"vocab_size": VOCAB, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 40}
WHISPER = {**BART, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 40}
SPEECH = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "conv_dim": (8, 8),
    "conv_kernel": (10, 3),
    "conv_stride": (50, 20),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
CLIP = {
    "text_config": {**CLIP_TOWER, "vocab_size": VOCAB, "max_position_embeddings": 40, "eos_token_id": 2},
    "vision_config": {**CLIP_TOWER, "image_size": 16, "patch_size": 8},
    "projection_dim": 8,
}
WIDE = {**VISION, "image_size": [16, 32]}
SPECTRUM = {**VISION, "num_mel_bins": 16, "max_length": 48, "frequency_stride": 4, "time_stride": 4}


def ids(length: int = TOKENS) -> torch.Tensor:
    return torch.arange(5, 5 + length).view(1, length) % VOCAB


def text() -> dict[str, torch.Tensor]:
    return {"input_ids": ids()}


def pairs() -> dict[str, torch.Tensor]:
    return {"input_ids": ids(), "decoder_input_ids": ids()}


def image(height: int = 16, width: int = 16) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.zeros(1, 3, height, width)}


CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "BertForMaskedLM": ("Bert", BERT, text),
    "BertForSequenceClassification": ("Bert", BERT, text),
    "BertForTokenClassification": ("Bert", BERT, text),
    "BertForQuestionAnswering": ("Bert", {**BERT, "num_labels": 2}, text),
    "RobertaForMaskedLM": ("Roberta", BERT, text),
    "AlbertForMaskedLM": ("Albert", {**BERT, "embedding_size": 12}, text),
    "DistilBertForMaskedLM": ("DistilBert", DISTIL, text),
    "ElectraForTokenClassification": ("Electra", {**BERT, "embedding_size": 12}, text),
    "DebertaV2ForMaskedLM": ("DebertaV2", {**BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, text),
    "ModernBertForMaskedLM": ("ModernBert", BERT, text),
    "MPNetForMaskedLM": ("MPNet", BERT, text),
    "GPT2LMHeadModel": ("GPT2", GPT2, text),
    "BloomForCausalLM": ("Bloom", {"vocab_size": VOCAB, "hidden_size": 24, "n_layer": 3, "n_head": 4}, text),
    "LlamaForCausalLM": ("Llama", GQA, text),
    "Gemma2ForCausalLM": ("Gemma2", {**GQA, "query_pre_attn_scalar": 4}, text),
    "T5ForConditionalGeneration": ("T5", T5, pairs),
    "BartForConditionalGeneration": ("Bart", BART, pairs),
    "ViTForImageClassification": ("ViT", VISION, image),
    "Dinov2ForImageClassification": ("Dinov2", VISION, image),
    "WhisperForConditionalGeneration": (
        "Whisper",
        WHISPER,
        lambda: {"input_features": torch.zeros(1, 8, 40), "decoder_input_ids": ids()},
    ),
    "Wav2Vec2ForCTC": ("Wav2Vec2", SPEECH, lambda: {"input_values": torch.zeros(1, 160_000)}),
    "CLIPModel": ("CLIP", CLIP, lambda: {**text(), **image()}),
}


def build(name: str, device: str = "cpu") -> Any:
    family, settings, _ = CASES[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**settings))
    model.set_attn_implementation("eager")  # torch has no formula for the fused attention of a CPU
    return model.requires_grad_(False).eval()


def truth(model: Any, inputs: dict[str, torch.Tensor]) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", CASES)
def test_total_and_heads(name: str) -> None:
    """Dense, without half of the heads, and without any: what the heads are said to cost is what goes with them."""
    model, inputs = build(name), CASES[name][2]()
    bare = headprune.remove(build(name), flat(all_units(headprune.resolve(model))))
    nothing = truth(bare, inputs)
    for heads in ([], some_heads(headprune.resolve(model))):
        headprune.remove(model, heads)
        counted = flops(model, headprune.resolve(model), tokens=TOKENS)
        assert counted.total == truth(model, inputs)
        assert counted.total - counted.heads == nothing
    counted = flops(bare, headprune.resolve(bare), tokens=TOKENS)
    assert (counted.total, counted.heads) == (nothing, 0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "name", ["BertForMaskedLM", "LlamaForCausalLM", "CLIPModel", "WhisperForConditionalGeneration"]
)
def test_without_weights_and_with_any_attention(name: str, attention: str) -> None:
    model = build(name, "meta")
    model.set_attn_implementation(attention)
    assert flops(model, headprune.resolve(model), tokens=TOKENS).total == truth(build(name), CASES[name][2]())


def test_masked_language_model_by_hand() -> None:
    """Four maps and two products per layer, the feed-forward, and a head whose maps all run on every token."""
    model = build("BertForMaskedLM")
    width, inner = 24, 20
    heads = 3 * 2 * (TOKENS * 4 * width * width + 2 * TOKENS * TOKENS * width)
    rest = 3 * 2 * TOKENS * 2 * width * inner + 2 * TOKENS * (width * width + width * VOCAB)
    assert flops(model, headprune.resolve(model), tokens=TOKENS) == costs.Flops(TOKENS, {"heads": heads}, heads + rest)


def test_experts_by_hand() -> None:
    """Every token is routed, and then goes to two experts of three maps each."""
    settings = {**GQA, "hidden_size": 32, "intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**settings)).eval()
    width, inner, query, key = 32, 16, 6 * 4, 3 * 4
    heads = 3 * 2 * (TOKENS * (2 * width * query + 2 * width * key) + 2 * TOKENS * TOKENS * query)
    rest = 3 * 2 * TOKENS * (4 * width + 2 * 3 * width * inner) + 2 * TOKENS * width * VOCAB
    assert flops(model, headprune.resolve(model), tokens=TOKENS) == costs.Flops(TOKENS, {"heads": heads}, heads + rest)


def test_half_precision() -> None:
    for name in ("ViTForImageClassification", "WhisperForConditionalGeneration"):
        model, half = build(name), build(name).to(torch.bfloat16)
        assert flops(half, headprune.resolve(half)) == flops(model, headprune.resolve(model))
        assert half.dtype == torch.bfloat16


def test_the_model_runs_once_for_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only heads change between steps; anything else that changes is counted again."""
    model, calls = build("BertForTokenClassification"), []
    flop_count._cache.clear()  # which other tests may have filled
    real = flop_count._count
    monkeypatch.setattr(flop_count, "_count", lambda *args: (calls.append(1), real(*args))[1])
    for unit in all_units(headprune.resolve(model)):
        headprune.remove(model, unit)
        assert flops(model, headprune.resolve(model), tokens=TOKENS).total == truth(model, text())
    assert len(calls) == 1
    model.classifier = torch.nn.Linear(24, 40)
    assert flops(model, headprune.resolve(model), tokens=TOKENS).total == truth(model, text())
    assert flops(model, headprune.resolve(model), tokens=10).total == truth(model, {"input_ids": ids(10)})
    assert len(calls) == 3


def test_heads_that_come_back_are_counted() -> None:
    """Counted without heads first: a site that has some again is not free of charge."""
    bare, dense = build("BertForMaskedLM"), build("BertForMaskedLM")
    headprune.remove(bare, flat(headprune.resolve(bare)[1].units()))
    flops(bare, headprune.resolve(bare), tokens=TOKENS)
    bare.__dict__.clear()
    bare.__dict__.update(dense.__dict__)
    assert flops(bare, headprune.resolve(bare), tokens=TOKENS).total == truth(dense, text())


class AskingBert(transformers.BertForSequenceClassification):
    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:  # type: ignore[override]
        if input_ids.sum().item() < 0:
            raise AssertionError("token ids are not negative")
        return super().forward(input_ids=input_ids, **options)


def test_where_the_forward_needs_numbers_the_weights_are_counted() -> None:
    model = build("BertForSequenceClassification")
    expected = flops(model, headprune.resolve(model), tokens=TOKENS)
    asking = AskingBert(model.config).eval()
    assert flop_count.count(asking, headprune.resolve(asking), [{"input_ids": ids().to("meta")}]) is None
    assert flops(asking, headprune.resolve(asking), tokens=TOKENS) == expected
    assert flops(asking, headprune.resolve(asking), batch={"input_ids": ids()}) == expected


def test_hooks_of_others_do_not_see_the_count() -> None:
    model, seen = build("BertForMaskedLM"), []
    for module in (model, model.bert.encoder.layer[0]):
        module.register_forward_hook(lambda *_: seen.append(1))
        module.register_forward_pre_hook(lambda *_: seen.append(1), with_kwargs=True)
    assert flop_count.count(model, headprune.resolve(model), costs.example_inputs(model, TOKENS)) is not None
    assert seen == []
    truth(model, text())
    assert len(seen) == 4


def test_a_batch_says_how_long_things_are() -> None:
    """One sample of it, with the labels where the decoder takes its inputs from."""
    model = build("T5ForConditionalGeneration")
    batch = {**text_batch(0, length=12), "labels": text_batch(1, length=7)["input_ids"]}
    counted = flops(model, headprune.resolve(model), batch=batch)
    assert counted.total == truth(model, {"input_ids": ids(12), "decoder_input_ids": ids(7)})
    assert counted.tokens == 12
    model = build("Wav2Vec2ForCTC")
    sound = torch.zeros(4, 8000)
    counted = flops(model, headprune.resolve(model), batch={"input_values": sound, "attention_mask": sound.long()})
    assert counted.total == truth(model, {"input_values": sound[:1]})
    assert counted.tokens == 8  # (8000 - 10) // 50 + 1 = 160 frames, and (160 - 3) // 20 + 1 of these


LENGTHS: dict[str, tuple[str, str, dict[str, Any], dict[str, torch.Tensor]]] = {
    "image": ("ViT", "ForImageClassification", VISION, image()),
    "image of two sizes": ("ViT", "ForImageClassification", WIDE, image(16, 32)),
    "patch of two sizes": ("ViT", "ForImageClassification", {**WIDE, "patch_size": [8, 4]}, image(16, 32)),
    "audio": ("Wav2Vec2", "Model", SPEECH, {"input_values": torch.zeros(1, 160_000)}),
    "frames": ("Whisper", "ForConditionalGeneration", WHISPER, {"input_features": torch.zeros(1, 8, 40)}),
    "spectrogram": ("AST", "Model", SPECTRUM, {"input_values": torch.zeros(1, 48, 16)}),
    "text": ("Bert", "Model", {**BERT, "max_position_embeddings": 200}, {"input_ids": torch.ones(1, 128).long()}),
    "short text": ("Bert", "Model", BERT, {"input_ids": torch.ones(1, 40).long()}),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_default_length_is_what_the_model_sees(name: str) -> None:
    family, kind, settings, inputs = LENGTHS[name]
    model = getattr(transformers, family + kind)(getattr(transformers, f"{family}Config")(**settings)).eval()
    site = headprune.resolve(model)[0]
    rows: list[int] = []
    model.get_submodule(site.o).register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[-2]))
    with torch.no_grad():
        model(**inputs, **({"decoder_input_ids": ids(3)} if model.config.is_encoder_decoder else {}))
    assert default_tokens(model) == rows[0]
    assert flops(model, headprune.resolve(model)).tokens == rows[0]
    assert headprune.inspect(model).flops.tokens == rows[0]


DINOV3 = {**VISION, "num_attention_heads": 3, "num_register_tokens": 2}
GPTJ = {**GPT2, "rotary_dim": 2, "n_inner": 20}


@pytest.mark.parametrize(
    ("kind", "config", "inputs"),
    [
        ("DINOv3ViTModel", transformers.DINOv3ViTConfig(**DINOV3), image()),
        ("GPTJForCausalLM", transformers.GPTJConfig(**GPTJ), text()),
        ("BertForMaskedLM", transformers.BertConfig(**BERT), text()),
    ],
)
def test_counting_leaves_nothing_behind(kind: str, config: Any, inputs: dict[str, torch.Tensor]) -> None:
    """DINOv3 keeps coordinates by shape and device, for all models of its kind; GPT-J moves a table of its own."""
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).eval()
    twin = copy.deepcopy(model)
    model.train()
    before = state_of(model)
    assert flop_count.count(model, headprune.resolve(model), costs.sample_shapes(model, inputs)) is not None
    assert flops(twin, headprune.resolve(twin), batch=inputs) == flops(model, headprune.resolve(model), batch=inputs)
    assert_unchanged(model, before)
    assert model.training
    assert {type(buffer) for buffer in model.buffers()} <= {torch.Tensor, torch.nn.Buffer}
    actual = outputs(model.eval(), inputs)
    assert {type(value) for value in actual.values()} == {torch.Tensor}
    assert identical(actual, outputs(copy.deepcopy(twin), inputs))


@pytest.mark.parametrize("entry", families())
def test_every_family_is_counted_by_running_it(entry: Any) -> None:
    model = entry.build()
    counted = flop_count.count(model, headprune.resolve(model), costs.example_inputs(model, None))
    if entry.name in ("bert-decoder-cross", "gpt2-cross"):
        assert counted is None  # their cross attention has nothing to look at
        counted = flop_count.count(model, headprune.resolve(model), costs.sample_shapes(model, entry.batch(0)))
    assert counted is not None
    assert all(cost > 0 for cost in counted.units)


def test_labels_of_a_classifier_are_not_a_decoder() -> None:
    model = ZOO["bert"].build()
    batch = {"input_ids": ids(9), "labels": torch.zeros(1, LABELS)}
    assert flops(model, headprune.resolve(model), batch=batch) == flops(model, headprune.resolve(model), tokens=9)
