"""Looking at the code of a module's forward: the one place that does, whatever wraps that code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn


@dataclass(frozen=True)
class ForwardCode:
    """What the code of a forward names. A name says that something may be read or called, not what is done with it."""

    arguments: frozenset[str]
    names: frozenset[str]  # attributes and globals, in the forward itself
    reach: frozenset[str]  # the same, with the methods of its own class that it names


def forward_code(module: nn.Module) -> ForwardCode | None:
    """The code that runs when the module is called; None where it cannot be seen, which is not the same as harmless.

    A site that surgery gave another class runs its family's code as well, so both count.
    """
    # A decorator that was told what it wraps is looked through; accelerate's wrapper of an instance is one of those.
    forwards: list[Callable[..., Any]] = [module.forward]
    base = getattr(type(module), "_base_class", None)
    if base is not None:
        forwards.append(base.forward)
    codes = [_code(forward) for forward in forwards]
    if not all(isinstance(code, CodeType) for code in codes):
        return None
    kind: Any = type(module)
    found = _read(kind, tuple(codes))
    # Code that names none of the modules inside belongs to a wrapper, and the forward is behind it.
    children = set(module._modules)
    return found if base is not None or not children or children & found.reach else None


@functools.lru_cache(maxsize=256)  # every site of a model asks the same
def _read(kind: type, codes: tuple[Any, ...]) -> ForwardCode:
    arguments: set[str] = set()
    names: set[str] = set()
    for code in codes:
        arguments.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
        names.update(_names(code))
    return ForwardCode(frozenset(arguments), frozenset(names), frozenset(_reach(kind, names)))


def _code(function: Any) -> CodeType | None:
    try:
        function = inspect.unwrap(function)
    except ValueError:  # a wrapper that wraps itself
        return None
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def _names(code: CodeType) -> Iterator[str]:
    """Names in the code and in what is defined inside it, such as a generator."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _reach(kind: type, names: set[str]) -> set[str]:
    reached, todo = set(names), list(names)
    while todo:
        method = inspect.getattr_static(kind, todo.pop(), None)
        # Methods of nn.Module itself are plumbing; properties and other descriptors are read through their getter.
        method = getattr(method, "fget", method)
        code = _code(method) if callable(method) or isinstance(method, (staticmethod, classmethod)) else None
        if code is not None and getattr(method, "__module__", "") != nn.Module.__module__:
            fresh = set(_names(code)) - reached
            reached |= fresh
            todo += fresh
    return reached
