"""Records the arguments with which a model calls its layers, while only the first layer of a stack computes.

A model calls every layer with the hidden states and with what all layers share: masks, positions, states of an encoder.
So one pass in which only the first layer of a stack computes tells how each of them is called; a layer can then run by
itself, once its weights and its hidden states are at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headprune.hooks.stop_forward import StopForwardError

MISSING = object()


class NotLayerwiseError(Exception):
    """The model computes something between its layers, or does not call them one after the other; the text says
    what."""


class _HiddenStates:
    """A placeholder for the hidden states in recorded arguments."""


HIDDEN_STATES = _HiddenStates()


@dataclass(frozen=True)
class LayerCall:
    """The arguments of a layer, with HIDDEN_STATES in place of its hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def on(self, layer: nn.Module, hidden: torch.Tensor) -> Any:
        """The output of the layer for these hidden states."""
        args, kwargs = insert_hidden((self.args, dict(self.kwargs)), hidden)
        return layer(*args, **kwargs)


@dataclass(frozen=True)
class StackCalls:
    """One stack on one batch: its calls in the order of its layers, the hidden states of the first, and the structure
    of the outputs."""

    calls: tuple[LayerCall, ...]
    hidden: torch.Tensor
    output_form: Any


def insert_hidden(value: Any, hidden: Any) -> Any:
    """The value with these hidden states in place of the placeholder."""
    return _map_nested(value, lambda part: hidden if part is HIDDEN_STATES else part)


def hidden_of(output: Any) -> torch.Tensor:
    """The hidden states in the output of a layer: its first tensor."""
    parts = output if isinstance(output, (tuple, list)) else (output,)
    if parts and isinstance(parts[0], torch.Tensor):
        return parts[0]
    raise NotLayerwiseError(f"a layer returns {type(output).__name__}, which does not begin with hidden states")


def _map_nested(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_map_nested(part, change) for part in value)
    if type(value) is dict:
        return {name: _map_nested(part, change) for name, part in value.items()}
    return change(value)


@contextmanager
def replace_forwards(replacements: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Run other functions in place of the forwards of these modules within a block."""
    with ExitStack() as stack:
        for module, forward in replacements:
            stack.callback(_restore_forward, module, vars(module).get("forward", MISSING))
            module.forward = forward
        yield


def _restore_forward(module: Any, forward: Any) -> None:
    if forward is MISSING:
        vars(module).pop("forward", None)
    else:
        module.forward = forward


def first_reached(model: nn.Module, inputs: Mapping[str, Any], done: Done, layers: Mapping[str, nn.Module]) -> str:
    """The path of the first of these layers that a pass reaches; empty where it reaches none."""
    reached: list[str] = []

    def stop(path: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            reached.append(path)
            raise StopForwardError

        return forward

    with torch.no_grad(), replace_forwards([*done, *((layer, stop(path)) for path, layer in layers.items())]):
        _run(model, inputs)
    return reached[0] if reached else ""


def record(
    model: nn.Module, inputs: Mapping[str, Any], done: Done, stack: Sequence[nn.Module], others: Sequence[nn.Module]
) -> StackCalls:
    """The calls of a stack of layers on these inputs. Its first layer must have its weights; layers of `done` stacks
    return their outputs, and the pass stops where the last layer, or one of `others`, would run."""
    calls: list[LayerCall] = []
    first_inputs: list[torch.Tensor] = []
    outputs: list[Any] = []

    def first(*args: Any, **kwargs: Any) -> Any:
        if calls:
            raise NotLayerwiseError("a layer runs more than once")
        hidden = _first_tensor(args, kwargs)
        first_inputs.append(hidden)
        calls.append(_call(args, kwargs, hidden))
        outputs.append(compute(*args, **kwargs))
        if len(stack) == 1:
            raise StopForwardError
        return outputs[0]

    def later(number: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if number != len(calls):
                raise NotLayerwiseError("its layers do not run one after the other")
            calls.append(_share_tensors(calls[-1], _call(args, kwargs, hidden_of(outputs[0]))))
            if number == len(stack) - 1:
                raise StopForwardError
            return outputs[0]

        return forward

    def refuse_other(*args: Any, **kwargs: Any) -> Any:
        raise NotLayerwiseError("layers of another stack run between those of one")

    compute = stack[0].forward
    replacements = [(stack[0], first), *((layer, later(number)) for number, layer in enumerate(stack) if number)]
    with torch.no_grad(), replace_forwards([*done, *replacements, *((layer, refuse_other) for layer in others)]):
        _run(model, inputs)
    if len(calls) != len(stack):
        raise NotLayerwiseError(f"of {len(stack)} layers in a row only {len(calls)} run")
    output_form = _map_nested(outputs[0], lambda part: HIDDEN_STATES if part is hidden_of(outputs[0]) else part)
    return StackCalls(tuple(calls), first_inputs[0], output_form)


Done = Sequence[tuple[nn.Module, Callable[..., Any]]]  # layers that have run, and functions that return their outputs


def returns(output: Any) -> Callable[..., Any]:
    """A forward that returns this output."""
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
    raise NotLayerwiseError("its first layer is called without hidden states")


def _call(args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: torch.Tensor) -> LayerCall:
    positions: list[bool] = []

    def change(part: Any) -> Any:
        if part is hidden:
            positions.append(True)
            return HIDDEN_STATES
        return part.detach() if isinstance(part, torch.Tensor) else part

    call = LayerCall(*_map_nested((args, dict(kwargs)), change))
    if not positions:
        raise NotLayerwiseError("something is computed between its layers")
    return call


def _share_tensors(previous: LayerCall, call: LayerCall) -> LayerCall:
    """The call with tensors that equal those of the previous layer replaced by these, so that a mask is kept once."""

    def same(one: Any, other: Any) -> Any:
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            same_kind = one.shape == other.shape and one.dtype == other.dtype
            return one if same_kind and torch.equal(one, other) else other
        if type(one) is type(other) and type(other) in (tuple, list) and len(one) == len(other):
            return type(other)(map(same, one, other))
        return other

    kwargs = {name: same(previous.kwargs.get(name), value) for name, value in call.kwargs.items()}
    args = tuple(same(previous.args, call.args)) if len(previous.args) == len(call.args) else call.args
    return LayerCall(args, kwargs)
