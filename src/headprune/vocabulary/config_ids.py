"""Token ids in configs: finds them, and replaces them by new ids."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

ID_NAMES = re.compile(r"(.*_)?token_(id|ids|index)|(bos|eos|pad|unk|mask|sep|cls)_index")
FORBIDDEN = ("suppress_tokens", "begin_suppress_tokens")  # ids of removed tokens are dropped from these lists
SEQUENCES = ("bad_words_ids", "force_words_ids", "forced_decoder_ids")
BY_NAME = ("lang_to_id", "task_to_id")
SIZES = ("vocab_size", "decoder_vocab_size")


def configs_with_vocabulary(root: Any, rows: int) -> list[Any]:
    """The config and nested configs with a vocabulary of this size; the ids in others belong to other vocabularies."""
    return [config for config in _nested_configs(root) if config is root or getattr(config, "vocab_size", None) == rows]


def configs_of(model: nn.Module, rows: int) -> list[Any]:
    """All such configs of a model, including copies in its modules, and its generation config."""
    root: Any = model.config
    configs = {id(config): config for config in configs_with_vocabulary(root, rows)}
    for module in model.modules():
        inner = [
            config
            for config in _nested_configs(getattr(module, "config", None))
            if getattr(config, "vocab_size", None) == rows
        ]
        configs.update((id(config), config) for config in inner)
    generation = getattr(model, "generation_config", None)
    return [*configs.values(), *([] if generation is None else [generation])]


def _nested_configs(config: Any) -> Iterator[Any]:
    if isinstance(config, PreTrainedConfig):
        yield config
        for value in vars(config).values():
            yield from _nested_configs(value)


def special_ids(config: Any) -> set[int]:
    """The ids of special tokens in a config."""
    ids: set[int] = set()
    for name, value in vars(config).items():
        if ID_NAMES.fullmatch(name):
            ids |= {entry for entry in (value if isinstance(value, list) else [value]) if _is_id(entry)}
        elif name in BY_NAME and isinstance(value, dict):
            ids |= {entry for entry in value.values() if _is_id(entry)}
    return ids


def renumber(config: Any, new: Mapping[int, int], rows: int, count: int) -> None:
    """Replace the token ids of a config by the new ones. Ids beyond the vocabulary are no tokens, and stay."""

    def new_id(entry: Any) -> Any:
        return new.get(entry, entry) if _is_id(entry) and entry < rows else entry

    for name in SIZES:
        if getattr(config, name, None) == rows:
            setattr(config, name, count)
    for name, value in list(vars(config).items()):
        if ID_NAMES.fullmatch(name):
            setattr(config, name, [new_id(entry) for entry in value] if isinstance(value, list) else new_id(value))
        elif name in FORBIDDEN and value:
            setattr(config, name, [new_id(entry) for entry in value if entry in new or not 0 <= entry < rows])
        elif name in SEQUENCES and value:
            setattr(config, name, _sequences(name, value, new, rows))
        elif name in BY_NAME and isinstance(value, dict):
            setattr(config, name, {key: new_id(entry) for key, entry in value.items()})


def _sequences(name: str, value: Any, new: Mapping[int, int], rows: int) -> Any:
    """Lists of ids; a list with a removed token is dropped. Entries of forced_decoder_ids are (position, id)."""
    if name == "forced_decoder_ids":
        return [[position, new.get(token, token)] for position, token in value]
    sequences = []
    for entry in value:
        if entry and isinstance(entry[0], list):
            sequences.append(_sequences(name, entry, new, rows))
        elif all(token in new or token >= rows for token in entry):
            sequences.append([new.get(token, token) for token in entry])
    return sequences or None


def _is_id(entry: Any) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0
