"""How the modules of a model are called: the arguments of each, and which linear map takes what another module gave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import Cache

from headprune.hooks.attach import hooks


@dataclass
class Call:
    """One call of a module, to be repeated: its arguments, without a memory of earlier tokens."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, module: nn.Module) -> Any:
        return module(*copied(self.args), **copied(self.kwargs))


@dataclass
class Trace:
    """The first call of every module that was asked for, and who took its output."""

    calls: dict[str, Call] = field(default_factory=dict)
    taker: dict[str, str] = field(default_factory=dict)  # module -> the linear map that was given its output


def copied(value: Any) -> Any:
    """Arguments without history: tensors detached and cloned, caches left out."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Cache):
        return None
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(copied(item) for item in value)
    if isinstance(value, list):
        return [copied(item) for item in value]
    if type(value) is dict:
        return {name: copied(item) for name, item in value.items()}
    return value


def first_tensor(output: Any) -> torch.Tensor | None:
    """The first floating-point tensor in what a module gives."""
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() else None
    items: Sequence[Any] = list(output.values()) if isinstance(output, dict) else output
    if isinstance(items, (tuple, list)):
        return next((found for item in items if (found := first_tensor(item)) is not None), None)
    return None


@contextmanager
def tracing(root: nn.Module, wanted: Sequence[str], linears: Sequence[str]) -> Iterator[Trace]:
    """Fill a trace while the model runs."""
    trace = Trace()
    given: dict[int, tuple[str, torch.Tensor]] = {}  # where an output lies -> who gave it; kept alive, so it stays true
    last: list[tuple[str, torch.Tensor]] = []  # the module that ended last
    modules = [(path, root.get_submodule(path)) for path in wanted]
    maps = [(path, root.get_submodule(path)) for path in linears]
    with (
        hooks([(module, _noting(trace, path)) for path, module in modules], before=True, with_kwargs=True),
        hooks([(module, _giving(given, last, path)) for path, module in modules]),
        hooks([(module, _taking(trace, given, last, path)) for path, module in maps], before=True),
    ):
        yield trace


def _noting(trace: Trace, path: str) -> Callable[..., None]:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if path not in trace.calls:
            trace.calls[path] = Call(copied(args), copied(kwargs))

    return note


def _giving(
    given: dict[int, tuple[str, torch.Tensor]], last: list[tuple[str, torch.Tensor]], path: str
) -> Callable[..., None]:
    def give(module: nn.Module, args: Any, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            given[tensor.data_ptr()] = (path, tensor)
            last[:] = [(path, tensor)]

    return give


def _taking(
    trace: Trace, given: dict[int, tuple[str, torch.Tensor]], last: list[tuple[str, torch.Tensor]], path: str
) -> Callable[..., None]:
    def take(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], torch.Tensor):
            return
        giver, tensor = given.get(args[0].data_ptr(), ("", args[0]))
        # A view of it, with the same numbers in the same order, is it as well.
        if giver and giver not in trace.taker and tensor.numel() == args[0].numel():
            trace.taker[giver] = path
        # Or the first map beside the module that runs after it and is as wide, when several outputs were joined.
        for giver, tensor in last:
            beside = path.startswith(giver.rpartition(".")[0]) and not path.startswith(giver + ".")
            if beside and giver not in trace.taker and tensor.shape[-1] == args[0].shape[-1]:
                trace.taker[giver] = path
        last.clear()

    return take
