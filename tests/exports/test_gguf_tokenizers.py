"""Texts are cut into the same tokens by llama.cpp and by the tokenizer that went into the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("gguf", reason="the extra gguf is not installed")
pytest.importorskip("xllamacpp", reason="the extra gguf is not installed")

import transformers as tf
from tokenizers import Regex, Tokenizer, pre_tokenizers

import headprune
import vocabularies
from headprune.errors import ExportError
from headprune.exports.gguf import Gguf
from llamas import built, log_probabilities, source_of

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
# Other ones than those with which the way of cutting is found.
TEXTS = (
    "The report: 12 heads, 3072 neurons; 99.5% of 1234567 tokens.",
    "   indented\n\tdef f(x):\n\t\treturn x**2\n\n\n# end",
    "Ünïcödé — “quoted”… naïve façade, 北京 und 中文, हिन्दी, русский",
    "👩‍👩‍👧 and 🇩🇪 flags",
    "they'll, THEY'LL, we'd've",
    "trailing blanks   ",
    "<s>special</s> tokens <pad> inside",
    "a",
)


def cutting(pattern: str) -> Any:
    """The byte-level tokenizer of the tests, with texts cut as Llama 3 or Qwen2 do it."""
    inner = Tokenizer.from_str(vocabularies.gpt2_tokenizer().backend_tokenizer.to_str())
    steps = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return tf.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def with_beginning() -> Any:
    """A tokenizer as Llama 2's that puts <s> before every text, and has a token that is not special."""
    words = vocabularies.byte_fallback_tokenizer()
    state = json.loads(words.backend_tokenizer.to_str())
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
    return tf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), **special)


KINDS: dict[str, Callable[[], Any]] = {
    "gpt-2": vocabularies.gpt2_tokenizer,
    "llama-3": lambda: cutting(LLAMA_3),
    "qwen-2": lambda: cutting(QWEN_2),
    "llama-2": vocabularies.byte_fallback_tokenizer,
    "llama-2-with-beginning": with_beginning,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens(kind: str, tmp_path: Path) -> None:
    words = KINDS[kind]()
    source = source_of(built("llama", words), tmp_path / "model", words)
    (tmp_path / "file").mkdir()
    Gguf().write(source, tmp_path / "file", None)
    runner = Gguf().open(tmp_path / "file", source, threads=1)
    actual = {text: runner.tokenize(text) for text in TEXTS}
    runner.close()
    assert actual == {text: words(text)["input_ids"] for text in TEXTS}


def test_what_belongs_to_a_tokenizer_is_in_the_file(tmp_path: Path) -> None:
    import gguf

    words = with_beginning()
    words.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    source = source_of(built("llama", words), tmp_path / "model", words)
    Gguf().write(source, tmp_path, None)
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == words.chat_template
    said = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in SAID}
    assert said == {"bos_token_id": 1, "eos_token_id": 2, "add_bos_token": True, "add_eos_token": False}
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == source.model.config.vocab_size  # two rows more than tokens
    assert tokens[: len(words)] == words.convert_ids_to_tokens(list(range(len(words))))


SAID = ("bos_token_id", "eos_token_id", "add_bos_token", "add_eos_token")


def words_apart() -> Any:
    """Texts are cut at every letter e, which llama.cpp knows no name for."""
    return cutting(r"e|[^e]+")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (words_apart, "splits texts into other tokens"),
        (vocabularies.t5_tokenizer, "BPE vocabularies, and this tokenizer is Unigram"),
        (vocabularies.bert_tokenizer, "BPE vocabularies, and this tokenizer is WordPiece"),
    ],
)
def test_tokenizers_without_a_place_in_gguf(words: Callable[[], Any], reason: str, tmp_path: Path) -> None:
    made = words()
    source = source_of(built("llama", made), tmp_path / "model", made)
    (tmp_path / "file").mkdir()
    with pytest.raises(ExportError, match=f"{reason}.*--to onnx"):
        Gguf().write(source, tmp_path / "file", None)
    assert not list((tmp_path / "file").iterdir())


@pytest.mark.parametrize("kind", ["gpt-2", "llama-2"])
def test_smaller_vocabularies(kind: str, tmp_path: Path) -> None:
    words = KINDS[kind]()
    model = built("llama", words)
    texts = vocabularies.some_lines(count=6)
    smaller, kept = headprune.shrink_vocabulary(model, words, texts)
    assert len(kept) < len(words)
    source = source_of(model, tmp_path / "model", smaller, tuple(text[:40] for text in texts[:3]))
    Gguf().write(source, tmp_path, None)
    runner = Gguf().open(tmp_path, source, threads=1)
    actual = {text: runner.tokenize(text) for text in texts}
    logits = runner(**source.batch).logits
    runner.close()
    assert actual == {text: smaller(text)["input_ids"] for text in texts}
    assert logits is not None
    assert (logits - log_probabilities(model, source)).abs().max() < 1e-3
