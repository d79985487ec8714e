"""Tiny random models of every supported family, with padded batches: what most tests run on.

Head count, head width and layer count differ on purpose, so that a mix-up of axes cannot go unnoticed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as tf

import headprune.models

VOCAB, LABELS = 61, 3


@dataclass(frozen=True)
class Entry:
    name: str
    build: Callable[[], Any]  # config -> model, without weights from anywhere
    batch: Callable[[int], dict[str, torch.Tensor]]
    sites: int
    heads: int
    kv_heads: int
    head_dim: int
    tags: frozenset[str] = field(default_factory=frozenset)


def text_batch(seed: int, *, size: int = 3, length: int = 9, left: bool = False) -> dict[str, torch.Tensor]:
    """Token ids with padding: every sample has another length, one of them fills the row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCAB, (size, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, size):
        pad = min(2 * row, length - 2)
        span = slice(0, pad) if left else slice(length - pad, length)
        mask[row, span], ids[row, span] = 0, 1
    return {"input_ids": ids, "attention_mask": mask}


def decoder_batch(seed: int) -> dict[str, torch.Tensor]:
    return text_batch(seed, left=True)


def seq2seq_batch(seed: int) -> dict[str, torch.Tensor]:
    target = text_batch(seed + 1000, length=6)
    return {
        **text_batch(seed),
        "decoder_input_ids": target["input_ids"],
        "decoder_attention_mask": target["attention_mask"],
    }


def image_batch(seed: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(seed))}


def audio_batch(seed: int) -> dict[str, torch.Tensor]:
    features = torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(seed))
    return {"input_features": features, "decoder_input_ids": text_batch(seed, length=6)["input_ids"]}


def clip_batch(seed: int) -> dict[str, torch.Tensor]:
    return {**text_batch(seed), **image_batch(seed)}


def _class(name: str, config: Any) -> Any:
    actual = getattr(tf, name)
    return actual._model_mapping[type(config)] if name.startswith("Auto") else actual


def _model(auto: str, config_class: str, **settings: Any) -> Callable[[], Any]:
    @functools.cache
    def original() -> Any:
        config = (getattr(tf, config_class, None) or getattr(headprune.models, config_class))(**settings)
        torch.manual_seed(0)
        model = _class(auto, config)._from_config(config)
        spread(model)
        return model.eval()

    def build() -> Any:
        model = copy.deepcopy(original())  # half the time of making it
        torch.manual_seed(0)
        return model

    return build


def spread(model: torch.nn.Module) -> None:
    """Weights large enough that every head matters, biases and norms away from their silent defaults."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:  # fixed sinusoids, which transformers neither trains nor saves
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2 and "embed" not in name and "bias" not in name:
                parameter.copy_(noise * 0.9 / parameter.shape[-1] ** 0.5)
            elif "norm" in name.lower() or "ln_" in name:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(0.3 * noise)


BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "max_position_embeddings": 40,
    "num_labels": LABELS,
    "pad_token_id": 1,
}
LLAMA = {**BERT, "head_dim": 6, "num_key_value_heads": 4, "tie_word_embeddings": False}
GQA = {**LLAMA, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4}
ALL_ATTENTION = {name: value for name, value in LLAMA.items() if not name.startswith(("intermediate", "num_key"))}
ALL_ATTENTION |= {"num_persistent_vectors": 5, "eos_token_id": 2}
VISION = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": LABELS,
}
BART = {
    "vocab_size": VOCAB,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 20,
    "decoder_ffn_dim": 20,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "scale_embedding": False,
}
CLIP_TOWER = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20}


def _tags(*names: str) -> frozenset[str]:
    return frozenset(names)


def _entries() -> list[Entry]:
    classify, generate = "AutoModelForSequenceClassification", "AutoModelForCausalLM"
    tiny_t5 = {
        "vocab_size": VOCAB,
        "d_model": 24,
        "d_kv": 5,
        "num_heads": 4,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "d_ff": 20,
        "relative_attention_num_buckets": 6,
        "relative_attention_max_distance": 10,
        "pad_token_id": 1,
        "decoder_start_token_id": 1,
    }
    return [
        Entry("bert", _model(classify, "BertConfig", **BERT), text_batch, 3, 4, 4, 6),
        Entry("roberta", _model(classify, "RobertaConfig", **BERT), text_batch, 3, 4, 4, 6),
        Entry("xlm-roberta", _model(classify, "XLMRobertaConfig", **BERT), text_batch, 3, 4, 4, 6),
        Entry(
            "albert",
            _model(classify, "AlbertConfig", **{**BERT, "embedding_size": 12}),
            text_batch,
            1,
            4,
            4,
            6,
            _tags("tied"),
        ),
        Entry("electra", _model(classify, "ElectraConfig", **{**BERT, "embedding_size": 12}), text_batch, 3, 4, 4, 6),
        Entry(
            "distilbert",
            _model(
                classify,
                "DistilBertConfig",
                vocab_size=VOCAB,
                dim=24,
                n_layers=3,
                n_heads=4,
                hidden_dim=20,
                max_position_embeddings=40,
                num_labels=LABELS,
                pad_token_id=1,
            ),
            text_batch,
            3,
            4,
            4,
            6,
        ),
        Entry(
            "deberta-v2",
            _model(
                classify,
                "DebertaV2Config",
                **BERT,
                relative_attention=True,
                pos_att_type=["c2p", "p2c"],
                position_buckets=4,
                share_att_key=False,
            ),
            text_batch,
            3,
            4,
            4,
            6,
            _tags("positions"),
        ),
        Entry(
            "deberta-v3",
            _model(
                classify,
                "DebertaV2Config",
                **BERT,
                relative_attention=True,
                pos_att_type=["c2p", "p2c"],
                position_buckets=4,
                share_att_key=True,
            ),
            text_batch,
            3,
            4,
            4,
            6,
        ),
        Entry("mpnet", _model(classify, "MPNetConfig", **BERT), text_batch, 3, 4, 4, 6),
        Entry(
            "modernbert",
            _model(classify, "ModernBertConfig", **{**BERT, "local_attention": 6, "global_attn_every_n_layers": 2}),
            text_batch,
            3,
            4,
            4,
            6,
            _tags("fused"),
        ),
        Entry(
            "bert-decoder-cross",
            _model("BertLMHeadModel", "BertConfig", **{**BERT, "is_decoder": True, "add_cross_attention": True}),
            lambda seed: {
                **text_batch(seed),
                "encoder_hidden_states": torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(seed)),
            },
            6,
            4,
            4,
            6,
            _tags("cross"),
        ),
        Entry(
            "gpt2",
            _model(
                generate, "GPT2Config", vocab_size=VOCAB, n_embd=24, n_layer=3, n_head=4, n_positions=40, eos_token_id=2
            ),
            decoder_batch,
            3,
            4,
            4,
            6,
            _tags("decoder", "conv1d", "fused"),
        ),
        Entry(
            "gpt2-cross",
            _model(
                generate,
                "GPT2Config",
                vocab_size=VOCAB,
                n_embd=24,
                n_layer=2,
                n_head=4,
                n_positions=40,
                add_cross_attention=True,
                eos_token_id=2,
            ),
            lambda seed: {
                **text_batch(seed),
                "encoder_hidden_states": torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(seed)),
            },
            4,
            4,
            4,
            6,
            _tags("cross", "conv1d"),
        ),
        Entry(
            "gpt-neox",
            _model(generate, "GPTNeoXConfig", **{**BERT, "rotary_pct": 0.5, "hidden_size": 32}),
            decoder_batch,
            3,
            4,
            4,
            8,
            _tags("decoder", "interleaved"),
        ),
        Entry(
            "opt",
            _model(
                generate,
                "OPTConfig",
                **{**BERT, "ffn_dim": 20, "word_embed_proj_dim": 24, "do_layer_norm_before": True},
            ),
            decoder_batch,
            3,
            4,
            4,
            6,
            _tags("decoder"),
        ),
        Entry(
            "bloom",
            _model(generate, "BloomConfig", vocab_size=VOCAB, hidden_size=24, n_layer=3, n_head=4, pad_token_id=1),
            decoder_batch,
            3,
            4,
            4,
            6,
            _tags("decoder", "interleaved"),
        ),
        Entry("llama", _model(generate, "LlamaConfig", **LLAMA), decoder_batch, 3, 4, 4, 6, _tags("decoder", "native")),
        Entry(
            "llama-gqa",
            _model(generate, "LlamaConfig", **GQA),
            decoder_batch,
            3,
            6,
            3,
            4,
            _tags("decoder", "native", "gqa"),
        ),
        Entry(
            "llama-mqa",
            _model(generate, "LlamaConfig", **{**LLAMA, "num_key_value_heads": 1, "attention_bias": True}),
            decoder_batch,
            3,
            4,
            1,
            6,
            _tags("decoder", "gqa"),
        ),
        Entry(
            "mistral",
            _model(generate, "MistralConfig", **{**GQA, "sliding_window": 4}),
            decoder_batch,
            3,
            6,
            3,
            4,
            _tags("decoder", "native", "gqa"),
        ),
        Entry(
            "qwen2",
            _model(generate, "Qwen2Config", **{**GQA, "hidden_size": 24}),
            decoder_batch,
            3,
            6,
            3,
            4,
            _tags("decoder", "native", "gqa"),
        ),
        Entry(
            "qwen3",
            _model(generate, "Qwen3Config", **GQA),
            decoder_batch,
            3,
            6,
            3,
            4,
            _tags("decoder", "native", "gqa"),
        ),
        Entry(
            "gemma2",
            _model(generate, "Gemma2Config", **{**GQA, "query_pre_attn_scalar": 4, "sliding_window": 4}),
            decoder_batch,
            3,
            6,
            3,
            4,
            _tags("decoder", "native", "gqa"),
        ),
        Entry(
            "all-attention",
            _model(generate, "AllAttentionConfig", **ALL_ATTENTION),
            decoder_batch,
            3,
            4,
            4,
            6,
            _tags("decoder", "native"),
        ),
        Entry(
            "phi3",
            _model(generate, "Phi3Config", **{**GQA, "bos_token_id": 0, "eos_token_id": 2}),
            decoder_batch,
            3,
            6,
            3,
            4,
            _tags("decoder", "fused", "gqa"),
        ),
        Entry(
            "t5",
            _model("T5ForConditionalGeneration", "T5Config", **tiny_t5),
            seq2seq_batch,
            6,
            4,
            4,
            5,
            _tags("seq2seq", "cross"),
        ),
        Entry(
            "mt5",
            _model("MT5ForConditionalGeneration", "MT5Config", **tiny_t5),
            seq2seq_batch,
            6,
            4,
            4,
            5,
            _tags("seq2seq", "cross"),
        ),
        Entry(
            "bart",
            _model("BartForConditionalGeneration", "BartConfig", **BART),
            seq2seq_batch,
            6,
            4,
            4,
            6,
            _tags("seq2seq", "cross"),
        ),
        Entry(
            "whisper",
            _model(
                "WhisperForConditionalGeneration",
                "WhisperConfig",
                **{
                    **BART,
                    "num_mel_bins": 8,
                    "max_source_positions": 20,
                    "max_target_positions": 40,
                    "suppress_tokens": None,
                    "begin_suppress_tokens": None,
                },
            ),
            audio_batch,
            6,
            4,
            4,
            6,
            _tags("seq2seq", "cross"),
        ),
        Entry("vit", _model("ViTForImageClassification", "ViTConfig", **VISION), image_batch, 3, 4, 4, 6),
        Entry(
            "clip",
            _model(
                "CLIPModel",
                "CLIPConfig",
                text_config={
                    **CLIP_TOWER,
                    "vocab_size": VOCAB,
                    "max_position_embeddings": 40,
                    "eos_token_id": 2,
                    "pad_token_id": 1,
                },
                vision_config={**CLIP_TOWER, "image_size": 16, "patch_size": 8},
                projection_dim=8,
            ),
            clip_batch,
            4,
            4,
            4,
            6,
        ),
        Entry(
            "clip-text",
            _model(
                "CLIPTextModel",
                "CLIPTextConfig",
                **CLIP_TOWER,
                vocab_size=VOCAB,
                max_position_embeddings=40,
                eos_token_id=2,
                pad_token_id=1,
            ),
            text_batch,
            2,
            4,
            4,
            6,
        ),
        Entry(
            "clip-vision",
            _model("CLIPVisionModel", "CLIPVisionConfig", **CLIP_TOWER, image_size=16, patch_size=8),
            image_batch,
            2,
            4,
            4,
            6,
        ),
        # Kept out of the table on purpose: the layout of these is measured.
        Entry("camembert", _model(classify, "CamembertConfig", **BERT), text_batch, 3, 4, 4, 6, _tags("measured")),
        Entry(
            "dinov2",
            _model("Dinov2ForImageClassification", "Dinov2Config", **VISION),
            image_batch,
            3,
            4,
            4,
            6,
            _tags("measured"),
        ),
        Entry(
            "granite",
            _model(generate, "GraniteConfig", **GQA),
            decoder_batch,
            3,
            6,
            3,
            4,
            _tags("measured", "decoder", "gqa"),
        ),
        Entry(
            "marian",
            _model("MarianMTModel", "MarianConfig", **BART),
            seq2seq_batch,
            6,
            4,
            4,
            6,
            _tags("measured", "seq2seq", "cross"),
        ),
        Entry(
            "siglip-vision",
            _model(
                "SiglipVisionModel",
                "SiglipVisionConfig",
                **CLIP_TOWER,
                image_size=16,
                patch_size=8,
                vision_use_head=False,
            ),
            image_batch,
            2,
            4,
            4,
            6,
            _tags("measured"),
        ),
    ]


ZOO: dict[str, Entry] = {entry.name: entry for entry in _entries()}
