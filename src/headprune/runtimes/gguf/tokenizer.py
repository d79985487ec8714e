"""The vocabulary of a GGUF file, from a tokenizer of transformers: two kinds have a place there, both BPE."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headprune.data.encoder import load_tokenizer
from headprune.errors import ExportError
from headprune.store.processors import has_tokenizer

BYTE = re.compile(r"<0x[0-9A-F]{2}>")
SPECIAL = ("bos", "eos", "unk", "pad", "sep", "mask")
FAR = -1e6  # the score of what no merge makes
FIX = "export the model with --to onnx and run its tokenizer apart"


@dataclass
class Vocabulary:
    """What the file says of tokens. `pre` is how llama.cpp cuts texts before it merges; it is found by trying."""

    model: str  # gpt2: bytes are letters; llama: blanks are a letter, and what has none is spelled in bytes
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
    """The tokenizer in this folder; a file without one cannot be run by llama.cpp."""
    if folder is None or not has_tokenizer(folder):
        raise ExportError(
            "A GGUF file has the tokenizer in it, and none was found beside the model; save one there with "
            "tokenizer.save_pretrained."
        )
    return load_tokenizer(folder)


def vocabulary_of(tokenizer: Any, rows: int) -> Vocabulary:
    """The vocabulary for a model with so many rows of embeddings; rows without a token get one that is never used."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ExportError(f"{type(tokenizer).__name__} is not a fast tokenizer, so GGUF has no place for it; {FIX}.")
    inner = json.loads(backend.to_str())
    model, vocab = inner["model"], tokenizer.get_vocab()
    if model["type"] != "BPE":
        raise ExportError(
            f"GGUF files of the Llama family have BPE vocabularies, and this tokenizer is {model['type']}; {FIX}."
        )
    if max(vocab.values()) >= rows:
        raise ExportError(
            f"The tokenizer knows {len(vocab)} tokens and the model {rows}; give the tokenizer that belongs to it."
        )
    spelled = bool(model.get("byte_fallback"))
    if not spelled and "ByteLevel" not in json.dumps([inner.get("pre_tokenizer"), inner.get("decoder")]):
        raise ExportError(f"llama.cpp cuts texts into bytes, and this tokenizer does not; {FIX}.")
    tokens, types = _tokens(tokenizer, vocab, rows)
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    found = Vocabulary("llama" if spelled else "gpt2", tokens, types)
    if spelled:
        found.scores, found.space_prefix = _scores(tokens, merges), _prepends(inner)
    else:
        found.merges = [" ".join(part.replace(" ", "Ġ") for part in pair) for pair in merges]
    numbers = {name: getattr(tokenizer, f"{name}_token_id", None) for name in SPECIAL}
    found.special = {name: number for name, number in numbers.items() if number is not None}
    found.adds = _adds(tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    found.template = template if isinstance(template, str) else None
    return found


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
    """llama.cpp merges what gives the token with the highest score; the earliest merge has it."""
    first: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        first.setdefault("".join(pair), rank)
    return [-float(first[token]) if token in first else FAR for token in tokens]


def _prepends(inner: dict[str, Any]) -> bool:
    """Whether a text begins with a blank that is not in it."""
    said = json.dumps([inner.get("normalizer"), inner.get("pre_tokenizer")])
    return '"Prepend"' in said or any(f'"prepend_scheme": "{scheme}"' in said for scheme in ("first", "always"))


def _adds(tokenizer: Any) -> dict[str, bool]:
    """What the tokenizer puts before and after a text, by trying."""
    plain, whole = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    if whole == plain:
        return {"bos": False, "eos": False}
    begins = whole[0] == tokenizer.bos_token_id and whole[:1] != plain[:1]
    return {"bos": begins, "eos": whole[-1] == tokenizer.eos_token_id and whole[-1:] != plain[-1:]}
