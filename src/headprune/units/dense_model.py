"""The dense counterpart of a model that may be pruned: its class, its config, a text of its structure, and its modules
on the meta device."""

from __future__ import annotations

import copy
import json
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from headprune.units.module_facts import facts_of, functions_of
from headprune.units.placeholders import is_placeholder
from headprune.units.quirks import is_empty
from headprune.units.slicing.record import NAMES, dense_numbers_of, put_numbers, with_numbers

# Settings that do not change what the model computes.
NOT_STRUCTURE = (
    *(*NAMES.values(), "headprune", "_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"),
    *("id2label", "label2id", "auto_map", "headprune_vocabulary"),
)
CACHED_MODELS = 8  # without weights

_on_meta: OrderedDict[tuple[Any, ...], nn.Module] = OrderedDict()


def dense_class(model: nn.Module) -> Any:
    """The original class; a loader derives a subclass of it."""
    return getattr(type(model), "headprune_dense", type(model))


def dense_config_class(model: Any) -> Any:
    """The original class of its config; a portable checkpoint derives a subclass of it."""
    kind = type(model.config)
    return getattr(kind, "headprune_dense", kind)


def dense_config(config: Any) -> Any:
    """A copy of the config without records of removed units."""
    numbers, config = dense_numbers_of(config), copy.deepcopy(config)
    for name in (*NAMES.values(), "headprune"):
        config.__dict__.pop(name, None)
    put_numbers(config, numbers)
    return config


def structure_of(config: Any) -> str:
    """All settings of the dense model that decide what it computes, as text."""

    def without_other_settings(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                str(name): without_other_settings(item) for name, item in value.items() if name not in NOT_STRUCTURE
            }
        return value

    settings = with_numbers(config.to_dict(), dense_numbers_of(config))
    return json.dumps(without_other_settings(settings), sort_keys=True, default=str)


def dense_on_meta(kind: Any, config: Any) -> nn.Module | None:
    """The model that this class builds from the dense config, without weights, to be read only; None where the class
    cannot be built from a config alone."""
    key = kind, structure_of(config), _label_counts(config.to_dict())
    if key not in _on_meta:
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"), quiet():
                _on_meta[key] = kind(dense_config(config))
        except Exception:  # whatever a class raises that needs other arguments
            return None
        while len(_on_meta) > CACHED_MODELS:
            _on_meta.popitem(last=False)
    _on_meta.move_to_end(key)
    return _on_meta[key]


def _label_counts(settings: Any) -> tuple[Any, ...]:
    """How many labels a config and its sub-configs have: the widths of heads, which are not a part of the structure."""
    if not isinstance(settings, dict):
        return ()
    counts = [len(labels) for name, labels in settings.items() if name == "id2label" and labels is not None]
    return (*counts, *(found for value in settings.values() if (found := _label_counts(value))))


def classes_of(kind: Any, config: Any) -> set[type]:
    """The classes of all modules of the dense model; none where it cannot be built."""
    dense = dense_on_meta(kind, config)
    return set() if dense is None else {type(module) for module in dense.modules()}


def changed_module(model: nn.Module) -> str | None:
    """The path of the first module that is not as the class of a transformers model builds it: of another class, with
    other functions or with hooks; None where all are, so that what holds for the class holds for the model. Hooks of
    the model itself see the same inputs and outputs whichever way units are removed. Other models are discovered on a
    copy of themselves, not of their class."""
    if not isinstance(model, PreTrainedModel):
        return None
    dense = dense_on_meta(dense_class(model), model.config)
    if dense is None:
        return ""
    expected, present = dict(dense.named_modules()), dict(model.named_modules())
    for path, module in present.items():
        if path and not is_placeholder(module):
            other = expected.get(path)
            if other is None or facts_of(module) != facts_of(other):
                return path
    for path in expected.keys() - present.keys():
        parent = path.rpartition(".")[0]
        if parent in present and not is_empty(present[parent]) and not is_placeholder(present[parent]):
            return path
    return "" if functions_of(model) != functions_of(dense) else None


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings and logs of transformers about a model that is built only to read its structure."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
