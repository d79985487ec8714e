"""The attention implementation of a model: its name, and another one within a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def implementation_name(model: nn.Module) -> str | None:
    """The attention implementation of a model, by its config; None where it has none."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None)


@contextmanager
def attention_implementation(model: nn.Module, choose: Callable[[str | None], str | None]) -> Iterator[None]:
    """Replace the implementation in every config of the model by the one that `choose` returns for it."""
    before = [(config, config._attn_implementation) for config in configs_of(model)]
    try:
        for config, name in before:
            config._attn_implementation = choose(name)
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


def configs_of(model: nn.Module) -> list[Any]:
    """The configs of a model and its modules, each once."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        config = getattr(config, "_base", config)  # of a pruned module, whose config wraps the model's
        if hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
    return list(configs.values())
