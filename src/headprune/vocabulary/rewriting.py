"""A tokenizer with fewer tokens: its own JSON, with every id in it as it is then."""

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
from headprune.vocabulary.pieces import Pieces, pair_of

CHUNK = 1000  # texts that are cut together
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template")


def state_of(tokenizer: Any) -> dict[str, Any]:
    """The JSON of a fast tokenizer; others have none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise VocabularyError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, and only those can be made smaller; load the model's "
            "with AutoTokenizer, or convert it."
        )
    state: dict[str, Any] = json.loads(backend.to_str())
    return state


def backend_of(state: Mapping[str, Any], *, as_text: bool = False) -> Tokenizer:
    """What cuts texts, whole and without padding; `as_text` has it take special tokens in a text for text."""
    made = Tokenizer.from_str(json.dumps(state))
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = as_text
    return made


def cut(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    """The ids of each text, special ones included."""
    for start in range(0, len(texts), CHUNK):
        for encoded in tokenizer.encode_batch_fast(texts[start : start + CHUNK]):
            yield encoded.ids


def special_ids(state: Mapping[str, Any]) -> set[int]:
    """Ids that the JSON itself speaks of: special tokens, what is put around texts, padding."""
    found = {entry["id"] for entry in state["added_tokens"] if entry["special"]}
    found |= {place for holder, key in _places(state) for place in _listed(holder[key])}
    return found


def rewritten(state: Mapping[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """The JSON with these tokens only, under their new ids."""
    result: dict[str, Any] = copy.deepcopy(dict(state))
    model, pieces = result["model"], Pieces(state)
    if isinstance(model["vocab"], list):
        model["vocab"] = [entry for place, entry in enumerate(model["vocab"]) if place in new]
    else:
        kept = sorted((new[place], token) for token, place in model["vocab"].items() if place in new)
        model["vocab"] = {token: place for place, token in kept}
    if model.get("unk_id") is not None:
        model["unk_id"] = new[model["unk_id"]]
    if model.get("merges"):
        known = {token for token, place in pieces.ids.items() if place in new}
        model["merges"] = [
            merge for merge in model["merges"] if known.issuperset([*pair_of(merge), pieces.joined(*pair_of(merge))])
        ]
    result["added_tokens"] = [{**e, "id": new[e["id"]]} for e in state["added_tokens"] if e["id"] in new]
    for holder, key in _places(result):
        value = holder[key]
        holder[key] = [new[place] for place in value] if isinstance(value, list) else new[value]
    return result


def rebuilt(tokenizer: Any, state: Mapping[str, Any]) -> Iterator[Any]:
    """Tokenizers as transformers loads them from this JSON: of the same class, which may put parts of it together in a
    way of its own, and of the general one, which takes it as it is."""
    for kind in (type(tokenizer), PreTrainedTokenizerFast):
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            for file in Path(folder).iterdir():
                if file.is_file() and not file.name.startswith(FILES):
                    file.unlink()
            (Path(folder) / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")
            made = None
            with suppress(Exception):  # a class that cannot do without some token says so in its own way
                made = kind.from_pretrained(folder)
        if made is not None:
            made.name_or_path = made.init_kwargs["name_or_path"] = tokenizer.name_or_path
            yield made


def _places(state: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Where ids stand outside of the vocabulary: (what holds them, its key)."""
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


def _listed(value: Any) -> list[int]:
    return value if isinstance(value, list) else [value]
