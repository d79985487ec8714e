"""Records calls of modules: the arguments of each, and which linear map takes the output of another module."""

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
class ModuleCall:
    """The arguments of one call of a module, to repeat it: without a KV cache."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, module: nn.Module) -> Any:
        return module(*detached_copy(self.args), **detached_copy(self.kwargs))


@dataclass
class Trace:
    """The first call of each requested module, and the linear map that took its output."""

    calls: dict[str, ModuleCall] = field(default_factory=dict)
    consumer: dict[str, str] = field(default_factory=dict)  # module -> the linear map that takes its output


def detached_copy(value: Any) -> Any:
    """A copy of arguments: tensors detached and cloned, KV caches replaced by None."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Cache):
        return None
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(detached_copy(item) for item in value)
    if isinstance(value, list):
        return [detached_copy(item) for item in value]
    if type(value) is dict:
        return {name: detached_copy(item) for name, item in value.items()}
    return value


def first_tensor(output: Any) -> torch.Tensor | None:
    """The first floating-point tensor in the output of a module."""
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() else None
    items: Sequence[Any] = list(output.values()) if isinstance(output, dict) else output
    if isinstance(items, (tuple, list)):
        return next((tensor for item in items if (tensor := first_tensor(item)) is not None), None)
    return None


@contextmanager
def tracing(root: nn.Module, paths: Sequence[str], linears: Sequence[str]) -> Iterator[Trace]:
    """Fill a trace while the model runs."""
    trace = Trace()
    # address of an output -> its module; the tensor is kept alive, so that the address stays valid
    producers: dict[int, tuple[str, torch.Tensor]] = {}
    last: list[tuple[str, torch.Tensor]] = []  # the module that ran last
    modules = [(path, root.get_submodule(path)) for path in paths]
    maps = [(path, root.get_submodule(path)) for path in linears]
    with (
        hooks([(module, _record_call(trace, path)) for path, module in modules], before=True, with_kwargs=True),
        hooks([(module, _record_output(producers, last, path)) for path, module in modules]),
        hooks([(module, _record_consumer(trace, producers, last, path)) for path, module in maps], before=True),
    ):
        yield trace


def _record_call(trace: Trace, path: str) -> Callable[..., None]:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if path not in trace.calls:
            trace.calls[path] = ModuleCall(detached_copy(args), detached_copy(kwargs))

    return note


def _record_output(
    producers: dict[int, tuple[str, torch.Tensor]], last: list[tuple[str, torch.Tensor]], path: str
) -> Callable[..., None]:
    def give(module: nn.Module, args: Any, output: Any) -> None:
        tensor = first_tensor(output)
        if tensor is not None:
            producers[tensor.data_ptr()] = (path, tensor)
            last[:] = [(path, tensor)]

    return give


def _record_consumer(
    trace: Trace, producers: dict[int, tuple[str, torch.Tensor]], last: list[tuple[str, torch.Tensor]], path: str
) -> Callable[..., None]:
    def take(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], torch.Tensor):
            return
        producer, tensor = producers.get(args[0].data_ptr(), ("", args[0]))
        # Or a view of it, with the same numbers in the same order.
        if producer and producer not in trace.consumer and tensor.numel() == args[0].numel():
            trace.consumer[producer] = path
        # Or the next map beside the module with the same width, where several outputs were concatenated.
        for producer, tensor in last:
            beside = path.startswith(producer.rpartition(".")[0]) and not path.startswith(producer + ".")
            if beside and producer not in trace.consumer and tensor.shape[-1] == args[0].shape[-1]:
                trace.consumer[producer] = path
        last.clear()

    return take
