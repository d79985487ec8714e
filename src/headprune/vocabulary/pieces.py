"""Which tokens a tokenizer needs to cut given texts as before, and which it needs for all others.

A BPE applies its merges by rank, so one that has all merges that texts use, and some others of the same, applies the
same ones to them. A Unigram model takes the best path through the pieces of a text: with fewer pieces, of which all of
that path are there, it still is the best. Only what no piece matches can come out otherwise; `Pieces.inside` is for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from headprune.errors import VocabularyError

KINDS = ("BPE", "Unigram", "WordLevel", "WordPiece")


class Pieces:
    """The tokens of a tokenizer, as its JSON has them, and how they hang together."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.model: Mapping[str, Any] = state["model"]
        self.kind = kind_of(self.model)
        vocab = self.model["vocab"]
        listed = isinstance(vocab, list)
        self.ids: dict[str, int] = {entry[0]: place for place, entry in enumerate(vocab)} if listed else dict(vocab)
        self.strings = {place: token for token, place in self.ids.items()}
        self.prefix: str = self.model.get("continuing_subword_prefix") or ""
        self.suffix: str = self.model.get("end_of_word_suffix") or ""
        self.byte_level = '"ByteLevel"' in _types(state.get("pre_tokenizer")) + _types(state.get("normalizer"))
        self.added = {entry["content"]: entry for entry in state["added_tokens"]}
        self._longest = max(map(len, self.ids), default=0)
        merges = [pair_of(merge) for merge in self.model.get("merges") or ()]
        self._ranks = {pair: rank for rank, pair in reversed(list(enumerate(merges)))}
        self._makers: dict[str, list[tuple[str, str]]] = {}
        for pair in merges:
            self._makers.setdefault(self.joined(*pair), []).append(pair)

    def joined(self, left: str, right: str) -> str:
        """The token that a merge makes."""
        return left + right.removeprefix(self.prefix) if self.prefix else left + right

    # --- what is always needed ---

    def always(self) -> set[int]:
        """Tokens that have to stay whatever the texts are: for what is unknown, and for every byte."""
        kept: set[int] = set()
        if self.model.get("unk_token") in self.ids:
            kept.add(self.ids[self.model["unk_token"]])
        if self.model.get("unk_id") is not None:
            kept.add(self.model["unk_id"])
        if self.byte_level:
            kept |= self._letters(pre_tokenizers.ByteLevel.alphabet())
        if self.model.get("byte_fallback"):
            kept |= self._known(f"<0x{byte:02X}>" for byte in range(256))
        if self.kind == "Unigram":  # the score of what is unknown is that of the worst piece, less a constant
            scores = [score for _, score in self.model["vocab"]]
            kept.add(min(range(len(scores)), key=scores.__getitem__))
        return kept

    def closed(self, kept: Collection[int]) -> set[int]:
        """These tokens, what they are merged from, and their letters, so that other words can at least be spelled."""
        result = set(kept)
        words = {
            self.strings[place] for place in kept if place in self.strings and self.strings[place] not in self.added
        }
        if self.kind == "BPE":
            for word in words:
                result |= self._known(self._parts(word))
        if self.kind != "WordLevel" and not self.byte_level:
            bare = (word.removeprefix(self.prefix).removesuffix(self.suffix) for word in words)
            result |= self._letters({letter for word in bare for letter in word})
        return result

    def inside(self, tokenizer: Tokenizer, text: str) -> set[int]:
        """Every token that can be found anywhere in a text: with all of them, it is cut as before."""
        normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
        cut = tokenizer.pre_tokenizer.pre_tokenize_str(normal) if tokenizer.pre_tokenizer else [(normal, None)]
        found: set[int] = set()
        for word in {word for word, _ in cut}:
            for start in range(len(word)):
                for end in range(start + 1, min(start + self._longest, len(word)) + 1):
                    found |= self._known(self._forms(word[start:end]))
        return found

    # --- parts ---

    def _parts(self, word: str) -> set[str]:
        """What a word is merged from, step by step. One that is not made by its own merges (a whole word that is looked
        up first, a byte) may still be a part of others: all its halves, and theirs."""
        symbols = self._symbols(word)
        seen = set(symbols)
        while len(symbols) > 1:
            ranked = [
                (self._ranks.get((one, other)), at) for at, (one, other) in enumerate(itertools.pairwise(symbols))
            ]
            best = min(((rank, at) for rank, at in ranked if rank is not None), default=None)
            if best is None:
                break
            symbols[best[1] : best[1] + 2] = [self.joined(*symbols[best[1] : best[1] + 2])]
            seen.add(symbols[best[1]])
        return seen if symbols == [word] else self._halves(word)

    def _halves(self, word: str) -> set[str]:
        found, open_ = {word}, [word]
        while open_:
            for pair in self._makers.get(open_.pop(), ()):
                open_ += [part for part in pair if part not in found]
                found |= set(pair)
        return found

    def _symbols(self, word: str) -> list[str]:
        body = word.removeprefix(self.prefix).removesuffix(self.suffix) or word
        inner = bool(self.prefix) and word.startswith(self.prefix)
        symbols = [letter if not (at or inner) else self.prefix + letter for at, letter in enumerate(body)]
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
        return self._known(form for letter in letters for form in self._forms(letter))

    def _known(self, tokens: Iterable[str]) -> set[int]:
        return {self.ids[token] for token in tokens if token in self.ids}


def kind_of(model: Mapping[str, Any]) -> str:
    """Files of early versions do not name it."""
    kind = model.get("type")
    if kind is None and "vocab" in model:
        kind = "BPE" if "merges" in model else "Unigram" if isinstance(model["vocab"], list) else "WordPiece"
    if kind not in KINDS:
        raise VocabularyError(f"A tokenizer of the kind {kind!r} is not understood; there are {', '.join(KINDS)}.")
    return str(kind)


def pair_of(merge: Any) -> tuple[str, str]:
    """A merge as files have it: a list of two, or, in earlier ones, with a blank between."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _types(part: Any) -> str:
    """The kinds of a step of a tokenizer and of the steps in it."""
    if isinstance(part, list):
        return "".join(map(_types, part))
    if not isinstance(part, dict):
        return ""
    return f'"{part.get("type")}"' + "".join(_types(inner) for inner in part.values() if isinstance(inner, list))
