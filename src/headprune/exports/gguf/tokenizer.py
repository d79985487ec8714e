"""The vocabulary of a GGUF file, from a BPE tokenizer of transformers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headprune.checkpoint.processors import has_tokenizer
from headprune.data.tokenizers import load_tokenizer
from headprune.errors import ExportError

BYTE = re.compile(r"<0x[0-9A-F]{2}>")
SPECIAL = ("bos", "eos", "unk", "pad", "sep", "mask")
NO_MERGE = -1e6  # the score of a token that is the result of no merge
FIX = "export the model with --to onnx, and run its tokenizer separately"


@dataclass
class Vocabulary:
    """The tokenizer of the file. `pre` is llama.cpp's pre-tokenizer, which pretokenizer.py chooses."""

    model: str  # gpt2: byte-level BPE; llama: BPE with byte fallback
    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    special: dict[str, int] = field(default_factory=dict)
    adds: dict[str, bool] = field(default_factory=dict)
    space_prefix: bool = False
    template: str | None = None
    pre: str = "default"

    def add_to(self, writer: Any) -> None:
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores:
            writer.add_token_scores(self.scores)
        if self.merges:
            writer.add_token_merges(self.merges)
        if self.model == "llama":
            writer.add_add_space_prefix(self.space_prefix)
        for name, number in self.special.items():
            getattr(writer, f"add_{name}_token_id")(number)
        for name, adds in self.adds.items():
            getattr(writer, f"add_add_{name}_token")(adds)
        if self.template:
            writer.add_chat_template(self.template)


def load(folder: Path | None) -> Any:
    """The tokenizer in this folder, which llama.cpp needs in the file."""
    if folder is None or not has_tokenizer(folder):
        raise ExportError(
            "A GGUF file includes the tokenizer, and there is none in the folder of the model; save one there with "
            "tokenizer.save_pretrained."
        )
    return load_tokenizer(folder)


def vocabulary_of(tokenizer: Any, rows: int) -> Vocabulary:
    """The vocabulary for a model with this many rows of embeddings; rows without a token get an unused one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ExportError(f"{type(tokenizer).__name__} is not a fast tokenizer, which GGUF needs; {FIX}.")
    record = json.loads(backend.to_str())
    model, vocab = record["model"], tokenizer.get_vocab()
    if model["type"] != "BPE":
        raise ExportError(
            f"GGUF files of the Llama family have BPE vocabularies, and this tokenizer is {model['type']}; {FIX}."
        )
    if max(vocab.values()) >= rows:
        raise ExportError(
            f"The tokenizer has {len(vocab)} tokens and the model {rows}; pass the tokenizer of the model."
        )
    byte_fallback = bool(model.get("byte_fallback"))
    if not byte_fallback and "ByteLevel" not in json.dumps([record.get("pre_tokenizer"), record.get("decoder")]):
        raise ExportError(f"llama.cpp supports only byte-level tokenizers, which this one is not; {FIX}.")
    tokens, types = _tokens(tokenizer, vocab, rows)
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    vocabulary = Vocabulary("llama" if byte_fallback else "gpt2", tokens, types)
    if byte_fallback:
        vocabulary.scores, vocabulary.space_prefix = _scores(tokens, merges), _adds_space_prefix(record)
    else:
        vocabulary.merges = [" ".join(part.replace(" ", "Ġ") for part in pair) for pair in merges]
    numbers = {name: getattr(tokenizer, f"{name}_token_id", None) for name in SPECIAL}
    vocabulary.special = {name: number for name, number in numbers.items() if number is not None}
    vocabulary.adds = _added_special_tokens(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    vocabulary.template = template if isinstance(template, str) else None
    return vocabulary


def _tokens(tokenizer: Any, vocab: dict[str, int], rows: int) -> tuple[list[str], list[int]]:
    import gguf

    tokens = [f"[PAD{number}]" for number in range(rows)]
    types = [gguf.TokenType.UNUSED] * rows
    added = tokenizer.added_tokens_decoder
    for token, number in vocab.items():
        tokens[number], types[number] = token, gguf.TokenType.NORMAL
        if number == tokenizer.unk_token_id:
            types[number] = gguf.TokenType.UNKNOWN
        elif number in added:
            types[number] = gguf.TokenType.CONTROL if added[number].special else gguf.TokenType.USER_DEFINED
        elif BYTE.fullmatch(token):
            types[number] = gguf.TokenType.BYTE
    return tokens, [int(kind) for kind in types]


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """llama.cpp merges the pair whose result has the highest score, which is that of the earliest merge."""
    first: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        first.setdefault("".join(pair), rank)
    return [-float(first[token]) if token in first else NO_MERGE for token in tokens]


def _adds_space_prefix(record: dict[str, Any]) -> bool:
    """Whether the tokenizer adds a space before a text."""
    text = json.dumps([record.get("normalizer"), record.get("pre_tokenizer")])
    return '"Prepend"' in text or any(f'"prepend_scheme": "{scheme}"' in text for scheme in ("first", "always"))


def _added_special_tokens(tokenizer: Any) -> dict[str, bool]:
    """Whether the tokenizer adds a BOS and an EOS token."""
    without, with_special = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    if with_special == without:
        return {"bos": False, "eos": False}
    has_bos = with_special[0] == tokenizer.bos_token_id and with_special[:1] != without[:1]
    return {"bos": has_bos, "eos": with_special[-1] == tokenizer.eos_token_id and with_special[-1:] != without[-1:]}
