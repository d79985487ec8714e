"""Chooses llama.cpp's pre-tokenizer, which splits texts before BPE merges: it has names only, so each is tested."""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headprune.errors import ExportError
from headprune.exports.gguf.server import Llama
from headprune.exports.gguf.tokenizer import FIX, Vocabulary
from headprune.exports.gguf.write import ARCHITECTURE

# Pre-tokenizers of the Llama family first, then others with different results. Synonyms are left out.
NAMES = (
    *("llama-bpe", "qwen2", "gpt-2", "smollm", "tekken", "deepseek-llm", "deepseek-coder", "falcon", "gpt-4o"),
    *("chatglm-bpe", "bloom", "viking", "default"),
)
# Common texts.
COMMON = (
    "The quick brown fox jumps over the lazy dog, and then it doesn't.",
    "Prices rose by 3.5 % in 2024 (from 1,250 to 1,294).",
    "First line\nSecond line\n\nNew paragraph:\tafter a tab.",
    "def add(a, b):\n    return a + b  # done",
)
# Texts on which pre-tokenizers differ.
ODD = (
    "  two blanks before,  two within, and one after ",
    "I'LL say it's THEY'RE'S we've",
    "12345678 1234 123 12 1 ½ ²",
    "Größe naïve café 東京 Привет мир שלום नमस्ते",
    "🙂👍🏽 emoji… and “quotes” — dashes",
    "\n\n\n   \n\t\t x\r\n",
    "a.b/c_d-e+f=g;h!?...",
    "CamelCaseAndUPPERcase",
)
RANDOM_TEXTS, RANDOM_TOKENS = 64, 6
# The only layer of the smallest model.
_LAYER = {
    **{f"blk.0.{name}_norm": (2,) for name in ("attn", "ffn")},
    **{f"blk.0.attn_{name}": (2, 2) for name in ("q", "k", "v", "output")},
    "blk.0.ffn_gate": (1, 2),
    "blk.0.ffn_up": (1, 2),
    "blk.0.ffn_down": (2, 1),
}


def choose(tokenizer: Any, vocabulary: Vocabulary, texts: Sequence[str] = ()) -> Vocabulary:
    """The vocabulary with the pre-tokenizer for which llama.cpp returns the ids of the tokenizer.

    `texts`, which are real ones, and common texts have to agree for one of them; where odd ones do not, a warning names
    one. Texts that the vocabulary cannot encode are not compared.
    """
    texts = [text for text in texts if text.strip()]
    compared = (*texts, *COMMON, *ODD, *_with_special(tokenizer), *_random_texts(tokenizer))
    expected = {text: tokenizer(text)["input_ids"] for text in compared}
    encodable = {text for text, ids in expected.items() if text in texts or _is_encodable(tokenizer, text, ids)}
    best: tuple[int, str, list[str]] | None = None
    for name in ("default",) if vocabulary.model == "llama" else NAMES:
        actual = _ids(replace(vocabulary, pre=name), expected)
        if actual is None:  # unknown to this llama.cpp
            continue
        wrong = [text for text in expected if text in encodable and actual[text] != expected[text]]
        if best is None or len(wrong) < best[0]:
            best = len(wrong), name, wrong
        if not wrong:
            break
    if best is None:
        raise ExportError(f"llama.cpp does not load this vocabulary; {FIX}.")
    _, name, wrong = best
    failing = [text for text in wrong if text in texts or text in COMMON]
    if failing:
        raise ExportError(
            f"llama.cpp splits texts into other tokens than this tokenizer, such as {_short(failing)}; {FIX}."
        )
    if wrong:
        warnings.warn(
            f"llama.cpp splits some texts into other tokens than the tokenizer: {_short(wrong)}", stacklevel=2
        )
    return replace(vocabulary, pre=name)


def _ids(vocabulary: Vocabulary, texts: Iterable[str]) -> dict[str, list[int]] | None:
    """The ids of these texts in llama.cpp with this vocabulary; None where it does not load."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocabulary.gguf"
        _write_smallest(file, vocabulary)
        try:
            llama = Llama(file, context=32, threads=1)
        except ExportError:
            return None
        try:
            return {text: llama.tokenize(text) for text in texts}
        finally:
            llama.close()


def _write_smallest(file: Path, vocabulary: Vocabulary) -> None:
    """Write the smallest model with this vocabulary: llama.cpp's server does not open a vocabulary alone."""
    import gguf

    rows, width = len(vocabulary.tokens), 2
    writer = gguf.GGUFWriter(file, ARCHITECTURE)
    for name, number in (("context_length", 32), ("embedding_length", width), ("block_count", 1)):
        getattr(writer, f"add_{name}")(number)
    writer.add_head_count([1])
    writer.add_head_count_kv([1])
    writer.add_feed_forward_length([1])
    writer.add_layer_norm_rms_eps(1e-5)
    vocabulary.add_to(writer)
    for name, shape in (("token_embd", (rows, width)), ("output_norm", (width,)), *_LAYER.items()):
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _with_special(tokenizer: Any) -> list[str]:
    """Texts with special tokens."""
    return [f"one {token} two" for token in tokenizer.all_special_tokens[:4] if token != tokenizer.unk_token]


def _random_texts(tokenizer: Any) -> list[str]:
    """Texts of random tokens of the vocabulary: a small one may not be able to encode any other."""
    rng, special = random.Random(0), set(tokenizer.all_special_ids)
    numbers = [number for number in range(len(tokenizer)) if number not in special]
    samples = [[rng.choice(numbers) for _ in range(RANDOM_TOKENS)] for _ in range(RANDOM_TEXTS)]
    texts = [tokenizer.decode(ids).strip() for ids in samples]
    return [text for text in texts if text and "\ufffd" not in text]


def _is_encodable(tokenizer: Any, text: str, ids: list[int]) -> bool:
    """Whether the vocabulary can encode the text without loss."""
    return tokenizer.decode(ids, skip_special_tokens=False).count(text) > 0


def _short(texts: Sequence[str]) -> str:
    return repr(texts[0] if len(texts[0]) <= 60 else f"{texts[0][:57]}...")
