"""The dense counterpart of a model that may be pruned: its class, its config, and a text of its structure."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.utils import logging

from headprune.units.cutting.record import NAMES, dense_numbers_of, put_numbers, with_numbers

# Settings that do not change what the model computes.
NOT_STRUCTURE = (
    *(*NAMES.values(), "headprune", "_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"),
    *("id2label", "label2id", "auto_map", "headprune_vocabulary"),
)


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
