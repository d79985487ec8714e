"""The tokens that a tokenizer needs to split some texts into the same tokens as before, and to encode any other text.

BPE applies merges by rank, so a subset of the merges that contains all those used on a text gives the same tokens. A
Unigram model takes the best path through the pieces of a text: with fewer pieces that include that path, it is still
the best. Only a part of a text that no piece matches can be split differently; `Pieces.inside` is for that case.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from headprune.errors import VocabularyError

KINDS = ("BPE", "Unigram", "WordLevel", "WordPiece")


class Pieces:
    """The tokens in the JSON of a tokenizer, and the merges that produce them."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.model: Mapping[str, Any] = state["model"]
        self.kind = kind_of(self.model)
        vocab = self.model["vocab"]
        listed = isinstance(vocab, list)
        self.ids: dict[str, int] = (
            {entry[0]: token_id for token_id, entry in enumerate(vocab)} if listed else dict(vocab)
        )
        self.strings = {token_id: token for token, token_id in self.ids.items()}
        self.prefix: str = self.model.get("continuing_subword_prefix") or ""
        self.suffix: str = self.model.get("end_of_word_suffix") or ""
        self.byte_level = '"ByteLevel"' in _types(state.get("pre_tokenizer")) + _types(state.get("normalizer"))
        self.added = {entry["content"]: entry for entry in state["added_tokens"]}
        self._longest = max(map(len, self.ids), default=0)
        merges = [pair_of(merge) for merge in self.model.get("merges") or ()]
        self._ranks = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
        self._makers: dict[str, list[tuple[str, str]]] = {}
        for pair in merges:
            self._makers.setdefault(self.merge(*pair), []).append(pair)

    def merge(self, left: str, right: str) -> str:
        """The token that a merge produces."""
        return left + right.removeprefix(self.prefix) if self.prefix else left + right

    # --- sets of tokens ---

    def always(self) -> set[int]:
        """Tokens that any text may need: the unknown token and the tokens of bytes."""
        ids: set[int] = set()
        if self.model.get("unk_token") in self.ids:
            ids.add(self.ids[self.model["unk_token"]])
        if self.model.get("unk_id") is not None:
            ids.add(self.model["unk_id"])
        if self.byte_level:
            ids |= self._letters(pre_tokenizers.ByteLevel.alphabet())
        if self.model.get("byte_fallback"):
            ids |= self._ids_of(f"<0x{byte:02X}>" for byte in range(256))
        if self.kind == "Unigram":  # the score of an unknown character is that of the worst piece, less a constant
            scores = [score for _, score in self.model["vocab"]]
            ids.add(min(range(len(scores)), key=scores.__getitem__))
        return ids

    def with_parts(self, tokens: Collection[int]) -> set[int]:
        """These tokens, the tokens they are merged from, and their characters, so that other words can be spelled."""
        result = set(tokens)
        words = {
            self.strings[token] for token in tokens if token in self.strings and self.strings[token] not in self.added
        }
        if self.kind == "BPE":
            for word in words:
                result |= self._ids_of(self._parts(word))
        if self.kind != "WordLevel" and not self.byte_level:
            stripped = (word.removeprefix(self.prefix).removesuffix(self.suffix) for word in words)
            result |= self._letters({letter for word in stripped for letter in word})
        return result

    def inside(self, tokenizer: Tokenizer, text: str) -> set[int]:
        """Every token that matches a substring of a text: with all of them, the text is split as before."""
        normalized = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        words = (
            tokenizer.pre_tokenizer.pre_tokenize_str(normalized) if tokenizer.pre_tokenizer else [(normalized, None)]
        )
        ids: set[int] = set()
        for word in {word for word, _ in words}:
            for start in range(len(word)):
                for end in range(start + 1, min(start + self._longest, len(word)) + 1):
                    ids |= self._ids_of(self._forms(word[start:end]))
        return ids

    # --- helpers ---

    def _parts(self, word: str) -> set[str]:
        """The tokens that a word is merged from. Where the merges do not produce it (a whole word that is looked up
        first, a byte), the parts of all merges that would, recursively."""
        symbols = self._symbols(word)
        parts = set(symbols)
        while len(symbols) > 1:
            ranked = [
                (self._ranks.get((first, second)), position)
                for position, (first, second) in enumerate(itertools.pairwise(symbols))
            ]
            best = min(((rank, position) for rank, position in ranked if rank is not None), default=None)
            if best is None:
                break
            symbols[best[1] : best[1] + 2] = [self.merge(*symbols[best[1] : best[1] + 2])]
            parts.add(symbols[best[1]])
        return parts if symbols == [word] else self._halves(word)

    def _halves(self, word: str) -> set[str]:
        parts, pending = {word}, [word]
        while pending:
            for pair in self._makers.get(pending.pop(), ()):
                pending += [part for part in pair if part not in parts]
                parts |= set(pair)
        return parts

    def _symbols(self, word: str) -> list[str]:
        body = word.removeprefix(self.prefix).removesuffix(self.suffix) or word
        continues = bool(self.prefix) and word.startswith(self.prefix)
        symbols = [
            letter if not (position or continues) else self.prefix + letter for position, letter in enumerate(body)
        ]
        if self.suffix and word.endswith(self.suffix):
            symbols[-1] += self.suffix
        return symbols

    def _forms(self, text: str) -> Iterator[str]:
        yield text
        if self.prefix:
            yield self.prefix + text
        if self.suffix:
            yield text + self.suffix

    def _letters(self, letters: Iterable[str]) -> set[int]:
        return self._ids_of(form for letter in letters for form in self._forms(letter))

    def _ids_of(self, tokens: Iterable[str]) -> set[int]:
        return {self.ids[token] for token in tokens if token in self.ids}


def kind_of(model: Mapping[str, Any]) -> str:
    """The type of a tokenizer model; inferred for files of early versions, which do not name it."""
    kind = model.get("type")
    if kind is None and "vocab" in model:
        kind = "BPE" if "merges" in model else "Unigram" if isinstance(model["vocab"], list) else "WordPiece"
    if kind not in KINDS:
        raise VocabularyError(f"Tokenizers of type {kind!r} are not supported; use one of {', '.join(KINDS)}.")
    return str(kind)


def pair_of(merge: Any) -> tuple[str, str]:
    """A merge from a tokenizer file: a list of two, or, in earlier versions, a string with a blank between."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _types(part: Any) -> str:
    """The types of a step of a tokenizer and of nested steps."""
    if isinstance(part, list):
        return "".join(map(_types, part))
    if not isinstance(part, dict):
        return ""
    return f'"{part.get("type")}"' + "".join(_types(inner) for inner in part.values() if isinstance(inner, list))
