"""Real tokenizers of every kind, trained on the documentation, and tiny models with their vocabularies."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from zoo import spread

ROOT = Path(__file__).resolve().parents[1]
SIZE = 900
WIDTH = 24
POSITIONS = 80
SMALL = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20}
BYTES = pre_tokenizers.ByteLevel.alphabet()


@functools.cache
def lines() -> tuple[str, ...]:
    pages = [ROOT / "README.md", ROOT / "docs" / "concepts.md", ROOT / "docs" / "pruning.md"]
    text = [line.strip() for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    return tuple(line for line in text if line)


def some_lines(seed: int = 0, count: int = 12) -> list[str]:
    return random.Random(seed).sample([line for line in lines() if 20 < len(line) < 90], count)


def trained(model: Any, trainer: Any, before: Any) -> dict[str, Any]:
    inner = Tokenizer(model)
    inner.pre_tokenizer = before
    inner.train_from_iterator(lines(), trainer)
    return json.loads(inner.to_str())["model"]


@functools.cache
def pieces(special: tuple[str, ...]) -> list[tuple[str, float]]:
    options = {"vocab_size": SIZE, "special_tokens": list(special), "unk_token": "<unk>", "show_progress": False}
    before = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    actual = trained(models.Unigram(), trainers.UnigramTrainer(**options), before)
    return [(piece, score) for piece, score in actual["vocab"]]


@functools.cache
def merges() -> dict[str, Any]:
    options = {"vocab_size": SIZE, "special_tokens": ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]}
    trainer = trainers.BpeTrainer(initial_alphabet=BYTES, show_progress=False, **options)
    return trained(models.BPE(), trainer, pre_tokenizers.ByteLevel(add_prefix_space=False))


@functools.cache
def words() -> dict[str, int]:
    special = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=SIZE, special_tokens=special, show_progress=False)
    return trained(models.WordPiece(unk_token="[UNK]"), trainer, pre_tokenizers.BertPreTokenizer())["vocab"]


def xlm_roberta_tokenizer() -> Any:
    return tf.XLMRobertaTokenizer(vocab=[*pieces(("<s>", "<pad>", "</s>", "<unk>")), ("<mask>", 0.0)])


def t5_tokenizer() -> Any:
    extra = [(f"<extra_id_{number}>", 0.0) for number in reversed(range(10))]
    return tf.T5Tokenizer(vocab=[*pieces(("<pad>", "</s>", "<unk>")), *extra], extra_ids=10)


def albert_tokenizer() -> Any:
    return tf.AlbertTokenizer(vocab=pieces(("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")))


def bert_tokenizer() -> Any:
    return tf.BertTokenizer(vocab=dict(words()))


def roberta_tokenizer() -> Any:
    return tf.RobertaTokenizer(vocab=dict(merges()["vocab"]), merges=[tuple(pair) for pair in merges()["merges"]])


def gpt2_tokenizer() -> Any:
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return tf.GPT2Tokenizer(
        vocab=dict(merges()["vocab"]), merges=[tuple(pair) for pair in merges()["merges"]], **special
    )


def byte_fallback_tokenizer() -> Any:
    """As Llama 2's: blanks are a letter, what has no letter is spelled in bytes, and no word ends anywhere."""
    options = {"vocab_size": SIZE, "special_tokens": ["<unk>", "<s>", "</s>"], "show_progress": False}
    actual = trained(models.BPE(unk_token="<unk>"), trainers.BpeTrainer(**options), pre_tokenizers.Metaspace())
    vocab = {token: number for number, token in enumerate([*actual["vocab"], *(f"<0x{b:02X}>" for b in range(256))])}
    made = models.BPE(
        vocab, [tuple(pair) for pair in actual["merges"]], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    inner = Tokenizer(made)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


def built(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = kind(config)
    spread(model)
    return model.eval()


@dataclass(frozen=True)
class Case:
    """A model and its tokenizer, and how many parameters a token has there: a closed form."""

    name: str
    tokenizer: Callable[[], Any]
    model: Callable[[Any], Any]
    per_token: int


def _named(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def _roberta(kind: Any, config: Any = tf.XLMRobertaConfig) -> Callable[[Any], Any]:
    return lambda t: built(kind, config(**SMALL, **_named(t), max_position_embeddings=POSITIONS, num_labels=3))


def _bert(**settings: Any) -> Callable[[Any], Any]:
    return lambda t: built(
        tf.BertForMaskedLM, tf.BertConfig(**SMALL, **_named(t), max_position_embeddings=POSITIONS, **settings)
    )


def _llama(**settings: Any) -> Callable[[Any], Any]:
    options = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS, **settings}
    return lambda t: built(tf.LlamaForCausalLM, tf.LlamaConfig(**options, **_named(t)))


def _t5(tokenizer: Any) -> Any:
    sizes = {"d_model": WIDTH, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 4}
    named = {**_named(tokenizer), "vocab_size": len(tokenizer) + 18}  # more rows than tokens, as T5 has
    return built(tf.T5ForConditionalGeneration, tf.T5Config(**sizes, **named, decoder_start_token_id=0))


def _bart(tokenizer: Any) -> Any:
    layers = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in SIZES.items()}
    named = {"decoder_start_token_id": tokenizer.eos_token_id, "forced_eos_token_id": tokenizer.eos_token_id}
    config = tf.BartConfig(d_model=WIDTH, **layers, **_named(tokenizer), **named, max_position_embeddings=POSITIONS)
    model = built(tf.BartForConditionalGeneration, config)
    model.final_logits_bias.copy_(torch.randn(model.final_logits_bias.shape))
    return model


SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 20}


def _albert(tokenizer: Any) -> Any:
    config = tf.AlbertConfig(embedding_size=10, max_position_embeddings=POSITIONS, **SMALL, **_named(tokenizer))
    return built(tf.AlbertForMaskedLM, config)


def _mobilebert(tokenizer: Any) -> Any:
    own = {"embedding_size": 10, "intra_bottleneck_size": 12, "true_hidden_size": 12, "num_feedforward_networks": 1}
    config = tf.MobileBertConfig(**SMALL, **own, **_named(tokenizer), max_position_embeddings=POSITIONS)
    return built(tf.MobileBertForMaskedLM, config)


def _gpt2(tokenizer: Any) -> Any:
    config = tf.GPT2Config(n_embd=WIDTH, n_layer=2, n_head=4, n_positions=POSITIONS, **_named(tokenizer))
    return built(tf.GPT2LMHeadModel, config)


CASES = [
    Case("xlm-roberta-lm", xlm_roberta_tokenizer, _roberta(tf.XLMRobertaForMaskedLM), WIDTH + 1),  # tied, and a bias
    Case("xlm-roberta", xlm_roberta_tokenizer, _roberta(tf.XLMRobertaForSequenceClassification), WIDTH),
    Case("roberta", roberta_tokenizer, _roberta(tf.RobertaForMaskedLM, tf.RobertaConfig), WIDTH + 1),
    Case("bert-tied", bert_tokenizer, _bert(), WIDTH + 1),
    Case("bert-untied", bert_tokenizer, _bert(tie_word_embeddings=False), 2 * (WIDTH + 1)),  # two of each
    Case("albert", albert_tokenizer, _albert, 10 + 1),
    Case("mobilebert", bert_tokenizer, _mobilebert, WIDTH + 1),  # the head is the embeddings and the rest of the width
    Case("gpt2", gpt2_tokenizer, _gpt2, WIDTH),
    Case("llama-untied", byte_fallback_tokenizer, _llama(), 2 * WIDTH),
    Case("llama-tied", gpt2_tokenizer, _llama(tie_word_embeddings=True), WIDTH),
    Case("t5", t5_tokenizer, _t5, WIDTH),
    Case("bart", roberta_tokenizer, _bart, WIDTH),
]
