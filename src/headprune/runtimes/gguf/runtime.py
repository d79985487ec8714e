"""The runtime `gguf`: files for llama.cpp, and for what is built on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headprune.errors import ExportError
from headprune.extras import require
from headprune.runtimes.gguf import tokenizer as tokenizers
from headprune.runtimes.gguf.pretokenizer import choose
from headprune.runtimes.gguf.run import GgufRunner
from headprune.runtimes.gguf.support import refuse_model
from headprune.runtimes.gguf.write import FILE, write_file
from headprune.runtimes.spec import Runtime, Source, runtime

ROOM = 1024  # tokens
LOOKED_AT = 8  # rows of the data whose texts llama.cpp has to cut as the tokenizer does

SNIPPET = '''"""pip install xllamacpp"""

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = "DIR/model.gguf"
params.n_ctx = 2048
params.n_parallel = 1
server = xllamacpp.Server(params)
answer = server.handle_completions({"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0})
print(answer["choices"][0]["text"])
'''


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
    checked_tokens = 64  # each is a question of its own, and an answer has the whole vocabulary
    tolerance = 0.01  # of log-probabilities, which are what llama.cpp gives

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
        return GgufRunner(folder / FILE, context=_room(source), threads=threads)

    def snippet(self, folder: Path) -> str:
        return SNIPPET


def _rows(source: Source) -> int:
    model: Any = source.model
    return int(model.model.embed_tokens.weight.shape[0])


def _room(source: Source | None) -> int:
    """The longest row and what may be generated after it: a cache for all that a model can read may be larger than the
    memory there is."""
    return ROOM + (int(source.batch["input_ids"].shape[-1]) if source is not None else ROOM)


def _texts(tokenizer: Any, source: Source) -> list[str]:
    """The texts of some rows, as far as they can be told from their tokens: those that give the same ones again."""
    ids, mask = source.batch.get("input_ids"), source.batch.get("attention_mask")
    if ids is None or ids.dim() != 2:
        return []
    mask = torch.ones_like(ids) if mask is None else mask
    rows = [row[real.bool()].tolist() for row, real in zip(ids[:LOOKED_AT], mask[:LOOKED_AT], strict=True)]
    found = [(row, tokenizer.decode(row, skip_special_tokens=True)) for row in rows]
    return [text for row, text in found if tokenizer(text)["input_ids"] == row]
