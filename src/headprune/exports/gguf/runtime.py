"""The runtime `gguf`: files for llama.cpp, and for programs that are built on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headprune.errors import ExportError
from headprune.exports.gguf import tokenizer as tokenizers
from headprune.exports.gguf.pretokenizer import choose
from headprune.exports.gguf.run import GgufRunner
from headprune.exports.gguf.support import refuse_model
from headprune.exports.gguf.write import FILE, write_file
from headprune.exports.runtime import Runtime, Source, runtime
from headprune.extras import require
from headprune.snippets.programs import GGUF

GENERATED = 1024  # tokens that fit into the context after a text
CHECKED_ROWS = 8  # whose texts llama.cpp has to split as the tokenizer does


@runtime
class Gguf(Runtime):
    """llama.cpp, whose architecture `deci` takes layers that differ."""

    name = "gguf"
    title = "llama.cpp"
    extra = "gguf"
    modules = ("gguf", "xllamacpp")
    quantizations = ("q8_0", "q4_0")
    install = "xllamacpp"
    log_probabilities = True
    checked_tokens = 64  # each is a request, whose response has the whole vocabulary
    tolerance = 0.01  # of log-probabilities

    def refuse(self, source: Source) -> None:
        refuse_model(source)
        with require(self.extra, "GGUF files need"):
            tokenizers.vocabulary_of(tokenizers.load(source.folder), _rows(source))

    def write(self, source: Source, folder: Path, quantize: str | None) -> None:
        self.refuse(source)
        if quantize is not None and quantize not in self.quantizations:
            raise ExportError(f"GGUF files are quantised as {' or '.join(self.quantizations)}, not as {quantize}.")
        tokenizer = tokenizers.load(source.folder)
        vocabulary = choose(tokenizer, tokenizers.vocabulary_of(tokenizer, _rows(source)), _texts(tokenizer, source))
        write_file(source.model, folder / FILE, quantize=quantize, vocabulary=vocabulary)

    def open(self, folder: Path, source: Source | None = None, *, threads: int | None = None) -> GgufRunner:
        if not (folder / FILE).is_file():
            raise ExportError(f"There is no {FILE} in {folder}; export a model there first.")
        return GgufRunner(folder / FILE, context=_context(source), threads=threads)

    def snippet(self, folder: Path) -> str:
        return GGUF


def _rows(source: Source) -> int:
    model: Any = source.model
    return int(model.model.embed_tokens.weight.shape[0])


def _context(source: Source | None) -> int:
    """The context to open: the longest row and generated tokens, as a KV cache for the whole context of a model may not
    fit into memory."""
    return GENERATED + (int(source.batch["input_ids"].shape[-1]) if source is not None else GENERATED)


def _texts(tokenizer: Any, source: Source) -> list[str]:
    """The texts of some rows, decoded from their tokens: those that encode to the same tokens again."""
    ids, mask = source.batch.get("input_ids"), source.batch.get("attention_mask")
    if ids is None or ids.dim() != 2:
        return []
    mask = torch.ones_like(ids) if mask is None else mask
    rows = [row[real.bool()].tolist() for row, real in zip(ids[:CHECKED_ROWS], mask[:CHECKED_ROWS], strict=True)]
    texts = [(row, tokenizer.decode(row, skip_special_tokens=True)) for row in rows]
    return [text for row, text in texts if tokenizer(text)["input_ids"] == row]
