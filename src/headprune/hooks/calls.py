"""What a model gives its layers, recorded while the layers only stand in for themselves.

A model hands every layer the residual stream and what all layers share: masks, positions, states of an encoder. So one
pass in which only the first layer of a stack computes anything tells how each of them is called; a layer can then run
by itself, whenever its weights and its stream are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headprune.hooks.stop import StopForwardError

MISSING = object()


class UnfollowableError(Exception):
    """The model does something between its layers, or calls them in another way; the text says what."""


class _Stream:
    """Stands for the residual stream in what is recorded."""


STREAM = _Stream()


@dataclass(frozen=True)
class Call:
    """How a layer is called, with STREAM where its stream goes."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def on(self, layer: nn.Module, stream: torch.Tensor) -> Any:
        """What the layer gives for this stream."""
        args, kwargs = filled((self.args, dict(self.kwargs)), stream)
        return layer(*args, **kwargs)


@dataclass(frozen=True)
class Recorded:
    """One stack on one batch: its calls in the order of its layers, what goes into the first, and the form of what
    each gives."""

    calls: tuple[Call, ...]
    stream: torch.Tensor
    form: Any


def filled(value: Any, stream: Any) -> Any:
    """The value with this stream in it."""
    return _mapped(value, lambda part: stream if part is STREAM else part)


def stream_in(output: Any) -> torch.Tensor:
    """The residual stream in what a layer gives: the first tensor of it."""
    parts = output if isinstance(output, (tuple, list)) else (output,)
    if parts and isinstance(parts[0], torch.Tensor):
        return parts[0]
    raise UnfollowableError(f"a layer gives {type(output).__name__}, in which no stream is first")


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_mapped(part, change) for part in value)
    if type(value) is dict:
        return {name: _mapped(part, change) for name, part in value.items()}
    return change(value)


@contextmanager
def standing_in(replacements: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """These modules run other code for the length of the block."""
    with ExitStack() as stack:
        for module, forward in replacements:
            stack.callback(_put_back, module, vars(module).get("forward", MISSING))
            module.forward = forward
        yield


def _put_back(module: Any, own: Any) -> None:
    if own is MISSING:
        vars(module).pop("forward", None)
    else:
        module.forward = own


def first_reached(model: nn.Module, inputs: Mapping[str, Any], done: Done, layers: Mapping[str, nn.Module]) -> str:
    """The path of the layer, of these, that a pass comes to first; empty where it comes to none."""
    reached: list[str] = []

    def stop(path: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            reached.append(path)
            raise StopForwardError

        return forward

    with torch.no_grad(), standing_in([*done, *((layer, stop(path)) for path, layer in layers.items())]):
        _run(model, inputs)
    return reached[0] if reached else ""


def record(
    model: nn.Module, inputs: Mapping[str, Any], done: Done, stack: Sequence[nn.Module], others: Sequence[nn.Module]
) -> Recorded:
    """How a stack of layers is called on these inputs. Its first layer must have its weights; layers of `done` stacks
    give what they gave, and the pass ends where the last layer, or one of `others`, would run."""
    calls: list[Call] = []
    begun: list[torch.Tensor] = []
    given: list[Any] = []

    def first(*args: Any, **kwargs: Any) -> Any:
        if calls:
            raise UnfollowableError("a layer runs more than once")
        stream = _first_tensor(args, kwargs)
        begun.append(stream)
        calls.append(_call(args, kwargs, stream))
        given.append(compute(*args, **kwargs))
        if len(stack) == 1:
            raise StopForwardError
        return given[0]

    def later(number: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if number != len(calls):
                raise UnfollowableError("its layers do not run one after the other")
            calls.append(_shared(calls[-1], _call(args, kwargs, stream_in(given[0]))))
            if number == len(stack) - 1:
                raise StopForwardError
            return given[0]

        return forward

    def other(*args: Any, **kwargs: Any) -> Any:
        raise UnfollowableError("layers of another stack run between those of one")

    compute = stack[0].forward
    replaced = [(stack[0], first), *((layer, later(number)) for number, layer in enumerate(stack) if number)]
    with torch.no_grad(), standing_in([*done, *replaced, *((layer, other) for layer in others)]):
        _run(model, inputs)
    if len(calls) != len(stack):
        raise UnfollowableError(f"of {len(stack)} layers in a row {len(calls)} run")
    form = _mapped(given[0], lambda part: STREAM if part is stream_in(given[0]) else part)
    return Recorded(tuple(calls), begun[0], form)


Done = Sequence[tuple[nn.Module, Callable[..., Any]]]  # layers that have run, and what they give


def gives(output: Any) -> Callable[..., Any]:
    """Code of a layer that has run already."""
    return lambda *args, **kwargs: output


def _run(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    try:
        model(**inputs)
    except StopForwardError:
        return


def _first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    for value in (*args, *(kwargs.get(name) for name in ("hidden_states", "hidden_state", "x"))):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value
    raise UnfollowableError("its first layer is given no stream")


def _call(args: tuple[Any, ...], kwargs: Mapping[str, Any], stream: torch.Tensor) -> Call:
    found: list[bool] = []

    def change(part: Any) -> Any:
        if part is stream:
            found.append(True)
            return STREAM
        return part.detach() if isinstance(part, torch.Tensor) else part

    call = Call(*_mapped((args, dict(kwargs)), change))
    if not found:
        raise UnfollowableError("something is computed between its layers")
    return call


def _shared(before: Call, call: Call) -> Call:
    """The call with tensors that equal those of the layer before taken from there: a mask is kept once."""

    def same(one: Any, other: Any) -> Any:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            alike = one.shape == other.shape and one.dtype == other.dtype
            return one if alike and torch.equal(one, other) else other
        if type(one) is type(other) and type(other) in (tuple, list) and len(one) == len(other):
            return type(other)(map(same, one, other))
        return other

    kwargs = {name: same(before.kwargs.get(name), value) for name, value in call.kwargs.items()}
    args = tuple(same(before.args, call.args)) if len(before.args) == len(call.args) else call.args
    return Call(args, kwargs)
