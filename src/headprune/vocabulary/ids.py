"""Token ids that configs hold: which they are, and what they are called when tokens have new ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

NAMED = re.compile(r"(.*_)?token_(id|ids|index)|(bos|eos|pad|unk|mask|sep|cls)_index")
FORBIDDEN = ("suppress_tokens", "begin_suppress_tokens")  # what is not there need not be forbidden
SEQUENCES = ("bad_words_ids", "force_words_ids", "forced_decoder_ids")
BY_NAME = ("lang_to_id", "task_to_id")
SIZES = ("vocab_size", "decoder_vocab_size")


def own_configs(root: Any, rows: int) -> list[Any]:
    """The config and those in it that speak of a vocabulary of this size; others have ids of their own."""
    return [one for one in _nested(root) if one is root or getattr(one, "vocab_size", None) == rows]


def configs_of(model: nn.Module, rows: int) -> list[Any]:
    """Every such object of a model. Some models give copies of their config to their parts."""
    root: Any = model.config
    found = {id(one): one for one in own_configs(root, rows)}
    for module in model.modules():
        inner = [one for one in _nested(getattr(module, "config", None)) if getattr(one, "vocab_size", None) == rows]
        found.update((id(one), one) for one in inner)
    generation = getattr(model, "generation_config", None)
    return [*found.values(), *([] if generation is None else [generation])]


def _nested(config: Any) -> Iterator[Any]:
    if isinstance(config, PreTrainedConfig):
        yield config
        for value in vars(config).values():
            yield from _nested(value)


def named_ids(config: Any) -> set[int]:
    """The ids of tokens that a config gives a meaning to."""
    found: set[int] = set()
    for name, value in vars(config).items():
        if NAMED.fullmatch(name):
            found |= {entry for entry in (value if isinstance(value, list) else [value]) if _is_id(entry)}
        elif name in BY_NAME and isinstance(value, dict):
            found |= {entry for entry in value.values() if _is_id(entry)}
    return found


def renumber(config: Any, new: Mapping[int, int], rows: int, left: int) -> None:
    """Give ids of a config their new values. Those beyond the vocabulary mean no token, and stay."""

    def moved(entry: Any) -> Any:
        return new.get(entry, entry) if _is_id(entry) and entry < rows else entry

    for name in SIZES:
        if getattr(config, name, None) == rows:
            setattr(config, name, left)
    for name, value in list(vars(config).items()):
        if NAMED.fullmatch(name):
            setattr(config, name, [moved(entry) for entry in value] if isinstance(value, list) else moved(value))
        elif name in FORBIDDEN and value:
            setattr(config, name, [moved(entry) for entry in value if entry in new or not 0 <= entry < rows])
        elif name in SEQUENCES and value:
            setattr(config, name, _sequences(name, value, new, rows))
        elif name in BY_NAME and isinstance(value, dict):
            setattr(config, name, {key: moved(entry) for key, entry in value.items()})


def _sequences(name: str, value: Any, new: Mapping[int, int], rows: int) -> Any:
    """Lists of ids, each gone with any of its tokens; where a place is forced to a token, the place is no id."""
    if name == "forced_decoder_ids":
        return [[place, new.get(token, token)] for place, token in value]
    kept = []
    for entry in value:
        if entry and isinstance(entry[0], list):
            kept.append(_sequences(name, entry, new, rows))
        elif all(token in new or token >= rows for token in entry):
            kept.append([new.get(token, token) for token in entry])
    return kept or None


def _is_id(entry: Any) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0
