"""Builds a tokenizer with fewer tokens from the JSON of a fast tokenizer, with all ids renumbered."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from headprune.errors import VocabularyError
from headprune.vocabulary.needed_tokens import Pieces, pair_of

CHUNK = 1000  # texts encoded together
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template")


def state_of(tokenizer: Any) -> dict[str, Any]:
    """The JSON of a fast tokenizer; raises for others, which have none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise VocabularyError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, and only the vocabulary of a fast one can be shrunk; "
            "load the model's with AutoTokenizer, or convert it."
        )
    state: dict[str, Any] = json.loads(backend.to_str())
    return state


def backend_of(state: Mapping[str, Any], *, as_text: bool = False) -> Tokenizer:
    """A tokenizer without truncation and padding; with `as_text`, special tokens in a text are split like text."""
    backend = Tokenizer.from_str(json.dumps(state))
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = as_text
    return backend


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    """The ids of each text, including special tokens."""
    for start in range(0, len(texts), CHUNK):
        for encoded in tokenizer.encode_batch_fast(texts[start : start + CHUNK]):
            yield encoded.ids


def special_ids(state: Mapping[str, Any]) -> set[int]:
    """Ids of special tokens, of tokens that the post-processor adds, and of padding."""
    ids = {entry["id"] for entry in state["added_tokens"] if entry["special"]}
    ids |= {token for container, key in _id_entries(state) for token in _as_list(container[key])}
    return ids


def renumber_tokens(state: Mapping[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """The JSON with only these tokens, under their new ids."""
    result: dict[str, Any] = copy.deepcopy(dict(state))
    model, pieces = result["model"], Pieces(state)
    if isinstance(model["vocab"], list):
        model["vocab"] = [entry for token_id, entry in enumerate(model["vocab"]) if token_id in new]
    else:
        entries = sorted((new[token_id], token) for token, token_id in model["vocab"].items() if token_id in new)
        model["vocab"] = {token: token_id for token_id, token in entries}
    if model.get("unk_id") is not None:
        model["unk_id"] = new[model["unk_id"]]
    if model.get("merges"):
        tokens = {token for token, token_id in pieces.ids.items() if token_id in new}
        model["merges"] = [
            merge for merge in model["merges"] if tokens.issuperset([*pair_of(merge), pieces.merge(*pair_of(merge))])
        ]
    result["added_tokens"] = [{**e, "id": new[e["id"]]} for e in state["added_tokens"] if e["id"] in new]
    for container, key in _id_entries(result):
        value = container[key]
        container[key] = [new[token_id] for token_id in value] if isinstance(value, list) else new[value]
    return result


def rebuild(tokenizer: Any, state: Mapping[str, Any]) -> Iterator[Any]:
    """Tokenizers that transformers loads from this JSON: of the same class, which may change parts of it, and of
    PreTrainedTokenizerFast, which does not."""
    for kind in (type(tokenizer), PreTrainedTokenizerFast):
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            for file in Path(folder).iterdir():
                if file.is_file() and not file.name.startswith(FILES):
                    file.unlink()
            (Path(folder) / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")
            loaded = None
            with suppress(Exception):  # a class that needs a removed token may raise any error
                loaded = kind.from_pretrained(folder)
        if loaded is not None:
            loaded.name_or_path = loaded.init_kwargs["name_or_path"] = tokenizer.name_or_path
            yield loaded


def _id_entries(state: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Ids outside of the vocabulary, as (container, key)."""
    if state.get("padding"):
        yield state["padding"], "pad_id"
    steps = [state["post_processor"]] if state.get("post_processor") else []
    while steps:
        step = steps.pop()
        steps += step.get("processors") or []
        if step["type"] == "TemplateProcessing":
            for entry in step["special_tokens"].values():
                yield entry, "ids"
        elif step["type"] in ("RobertaProcessing", "BertProcessing"):
            yield step["sep"], 1
            yield step["cls"], 1


def _as_list(value: Any) -> list[int]:
    return value if isinstance(value, list) else [value]
