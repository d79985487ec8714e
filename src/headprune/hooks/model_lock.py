"""One call at a time on a model: hooks, gates, frozen parameters and the attention implementation in its config belong
to the model, so two threads that attach them at once would compute something else, and leave some of them behind."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from headprune.errors import UnsupportedModelError
from headprune.hooks.attention_implementation import configs_of

Function = TypeVar("Function", bound=Callable[..., Any])
_threads: dict[int, int] = {}  # by the id of a model or config in use: the thread that uses it
_changed = threading.Condition()


@contextmanager
def exclusive(model: Any) -> Iterator[None]:
    """Within a block the model is `locked`. Also outside of torch.inference_mode, in which there are no gradients, and
    tensors that are made can never have any."""
    with locked(model), torch.inference_mode(mode=False):
        yield


@contextmanager
def locked(model: Any) -> Iterator[None]:
    """Within a block no other thread has this model, a part of it, or another model with one of its configs; waits for
    those that have."""
    parts = {id(part) for part in (model, *configs_of(model))} if isinstance(model, nn.Module) else set()
    thread = threading.get_ident()
    with _changed:
        _changed.wait_for(lambda: all(_threads.get(part, thread) == thread for part in parts))
        taken = parts - _threads.keys()  # a call inside of another one, of the same thread, takes what is left
        _threads.update(dict.fromkeys(taken, thread))
    try:
        yield
    finally:
        with _changed:
            for part in taken:
                del _threads[part]
            _changed.notify_all()


def exclusively(function: Function) -> Function:
    """Make a function that takes a model first `exclusive` of it; anything else is refused."""

    @functools.wraps(function)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(model, nn.Module):
            raise UnsupportedModelError(
                f"{function.__name__} takes a model, not {model!r:.60}; load it first, with headprune.load."
            )
        with exclusive(model):
            return function(model, *args, **kwargs)

    return cast(Function, call)


def exclusively_if_loaded(function: Function) -> Function:
    """The same for a function that also takes the folder of a model."""

    @functools.wraps(function)
    def call(model: Any, *args: Any, **kwargs: Any) -> Any:
        with exclusive(model):
            return function(model, *args, **kwargs)

    return cast(Function, call)


def exclusive_method(function: Function) -> Function:
    """Make a method that takes a model, or whose object has one as `model`, `exclusive` of it."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = kwargs.get("model", *args[:1]) if function.__name__ == "__init__" else self.model
        with exclusive(model):
            return function(self, *args, **kwargs)

    return cast(Function, call)
