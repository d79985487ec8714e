"""Switches the attention implementation of a model within a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def attention_implementation(model: nn.Module, choose: Callable[[str | None], str]) -> Iterator[None]:
    """Replace the implementation in every config of the model by the one that `choose` returns for it."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        config = getattr(config, "_base", config)  # of a pruned module, whose config wraps the model's
        if hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config, name in before:
            config._attn_implementation = choose(name)
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name
