"""What decides what a module computes, beside its weights: its class, functions among its attributes, and hooks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from headprune.hooks.offload import is_dispatched
from headprune.hooks.torch_attention import original_class

RECORDERS = "transformers.utils.output_capturing"  # the module of hooks that record outputs and change none

Facts = tuple[Any, ...]


def facts_of(module: nn.Module) -> Facts:
    """Equal for modules that compute the same with the same weights and numbers."""
    return original_class(module), functions_of(module), tuple(_hooks(module))


def facts_and_shapes(model: nn.Module) -> Facts:
    """The same for a model with all its modules, and the shapes of its tensors."""
    shapes = tuple((name, tuple(tensor.shape)) for name, tensor in (*model.named_parameters(), *model.named_buffers()))
    return tuple((path, facts_of(module)) for path, module in model.named_modules()), shapes


def functions_of(module: nn.Module) -> Facts:
    """Functions that are attributes of the module itself: an activation, or a forward that replaces that of the class;
    but not accelerate's forward, which calls that one, nor other methods (`to`, `cuda`), which no forward calls."""
    return tuple(_functions(module))


def _functions(module: nn.Module) -> Iterator[Any]:
    for name, value in sorted(module.__dict__.items()):
        if name.startswith("_") or not callable(value):
            continue
        if not is_dispatched(module) if name == "forward" else not hasattr(nn.Module, name):
            yield name, _function_key(value)


def _function_key(value: Any) -> Any:
    if isinstance(value, functools.partial):
        return _function_key(value.func), repr(value.args), repr(sorted(value.keywords.items()))
    value = getattr(value, "__func__", value)  # of a method
    if hasattr(value, "__qualname__"):
        return value.__module__, value.__qualname__, getattr(value, "__code__", None)
    return type(value)


def _hooks(module: nn.Module) -> Iterator[str]:
    for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
        if getattr(hook, "__module__", "") != RECORDERS:
            yield getattr(hook, "__qualname__", type(hook).__qualname__)
