"""Token ids in configs: finds them, and replaces them by new ids.

Suppressed tokens, bad words and biased sequences that have a removed token are dropped: it cannot be generated."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

ID_NAMES = re.compile(r"(.*_)?token_(id|ids|index)|(bos|eos|pad|unk|mask|sep|cls)_index")
SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens")
FORCED = ("force_words_ids", "forced_decoder_ids")  # whose tokens are kept
BY_NAME = ("lang_to_id", "task_to_id", "text_decoder_lang_to_code_id")
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
    """The ids in a config of tokens that must be kept: special tokens, and those that generation forces."""
    ids: set[int] = set()
    for name, value in vars(config).items():
        if ID_NAMES.fullmatch(name):
            ids |= set(_ids_in(value))
        elif name in BY_NAME and isinstance(value, dict):
            ids |= set(_ids_in(list(value.values())))
        elif name == "forced_decoder_ids" and value:
            ids |= set(_ids_in([token for _, token in value]))
        elif name in FORCED:
            ids |= set(_ids_in(value))
    return ids


def _ids_in(value: Any) -> Iterator[int]:
    """The ids in a value of a config: one, or nested lists of them."""
    if isinstance(value, (list, tuple)):
        for entry in value:
            yield from _ids_in(entry)
    elif _is_id(value):
        yield value


def renumber(config: Any, new: Mapping[int, int], rows: int, count: int) -> None:
    """Replace the token ids of a config by the new ones. Ids beyond the vocabulary are no tokens, and stay."""

    def new_ids(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(new_ids(entry) for entry in value)
        return new.get(value, value) if _is_id(value) and value < rows else value

    def is_removed(token: int) -> bool:
        return 0 <= token < rows and token not in new

    for name in SIZES:
        if getattr(config, name, None) == rows:
            setattr(config, name, count)
    for name, value in list(vars(config).items()):
        if ID_NAMES.fullmatch(name):
            setattr(config, name, new_ids(value))
        elif name in BY_NAME and isinstance(value, dict):
            setattr(config, name, {key: new_ids(entry) for key, entry in value.items()})
        elif not value:
            continue
        elif name in SUPPRESSED:
            setattr(config, name, [new_ids(token) for token in value if not is_removed(token)])
        elif name == "forced_decoder_ids":
            setattr(config, name, [[position, new_ids(token)] for position, token in value])
        elif name in FORCED:
            setattr(config, name, new_ids(value))
        elif name == "bad_words_ids":
            setattr(config, name, [new_ids(ids) for ids in value if not any(map(is_removed, ids))] or None)
        elif name == "sequence_bias":
            biases = [(new_ids(ids), bias) for ids, bias in _biases(value) if not any(map(is_removed, ids))]
            setattr(config, name, (dict(biases) if isinstance(value, dict) else [list(b) for b in biases]) or None)


def _biases(value: Any) -> Iterator[tuple[Any, float]]:
    """Sequences of ids with their biases: from a list of pairs, or a dict, whose keys are text after JSON."""
    for ids, bias in value.items() if isinstance(value, dict) else value:
        yield ast.literal_eval(ids) if isinstance(ids, str) else ids, bias


def _is_id(entry: Any) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0
