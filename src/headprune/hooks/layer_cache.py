"""A cache of what layers gave: asked the same again, they do not compute it again.

Nothing is assumed about the order in which layers run, how often they run, or what lies between them. A call is
answered from memory only if the layer itself (its weights, and all else it holds) and everything it is given are what
they were; whatever changed anywhere in the model reaches a layer through one of these.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headprune.hooks.attach import HookedSite
from headprune.hooks.calls import standing_in
from headprune.hooks.paths import layer_path

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)


def cacheable_layers(model: nn.Module, sites: Sequence[HookedSite]) -> list[tuple[str, nn.Module]]:
    """The layers of these sites, by path. One that runs again and again in a pass (ALBERT's) changes as a whole, if it
    does, and would fill the memory for nothing."""
    again = {layer_path(site.path) for site in sites if site.applications > 1}
    paths = dict.fromkeys(layer_path(site.path) for site in sites)
    return [(path, model.get_submodule(path)) for path in paths if path not in again]


class _OpaqueError(Exception):
    """A value that may change without being seen, such as a KV cache."""


@dataclass(frozen=True)
class _Seen:
    """A tensor as it was: one that is written to since has another version."""

    tensor: torch.Tensor
    version: int

    @property
    def intact(self) -> bool:
        return self.tensor._version == self.version

    def same(self, other: torch.Tensor) -> bool:
        if not self.intact or self.tensor.shape != other.shape:
            return False
        if self.tensor is other:
            return True
        alike = (self.tensor.dtype, self.tensor.device) == (other.dtype, other.device)
        return alike and torch.equal(self.tensor, other)


@dataclass(frozen=True)
class Call:
    """One call of a layer: what the layer held, what it was given, what it gave."""

    state: list[tuple[Any, int]]
    given: Any
    output: Any
    gave: Any
    storages: Mapping[int, int]  # the bytes of each that it keeps alive, by address

    def answers(self, state: list[tuple[Any, int]], given: Any) -> bool:
        return (
            _same_state(self.state, state) and _same(self.given, given) and all(t.intact for t in _tensors(self.gave))
        )


Calls = dict[tuple[str, int], Call]  # by the layer's path, and how many calls of it went before in this pass


class LayerStates:
    """What layers hold, looked at once for all batches that go through them: that takes as long as a small layer.

    A layer that changes itself is found out when it first computes, or at the latest by `intact` at the end.
    """

    def __init__(self) -> None:
        self._states: dict[str, list[tuple[Any, int]]] = {}
        self._layers: dict[str, nn.Module] = {}
        self.changing: dict[str, bool] = {}  # whether a layer is another after it has computed

    def of(self, path: str, layer: nn.Module) -> list[tuple[Any, int]]:
        if path not in self._states:
            self._states[path], self._layers[path] = _state(layer), layer
        return self._states[path]

    def changes(self, path: str) -> bool:
        """Whether the layer, which has just computed, is another now."""
        if path not in self.changing:
            self.changing[path] = not self._same(path)
        return self.changing[path]

    def intact(self) -> bool:
        """Whether all layers hold what they held. Where not, what was answered from memory may be wrong."""
        return all(self._same(path) for path in self._states if not self.changing.get(path))

    def _same(self, path: str) -> bool:
        return _same_state(self._states[path], _state(self._layers[path]))


class LayerCache:
    """Answers calls of one forward pass from those of an earlier one with the same data, and remembers them for a
    later one, within `room` bytes. Passes over several batches of the same data may share what layers `held`. Where
    gradients are recorded, every layer computes.
    """

    def __init__(self, known: Mapping[tuple[str, int], Call], room: int, held: LayerStates | None = None) -> None:
        self.known = known
        self.room = room
        self.held = held or LayerStates()
        self.calls: Calls = {}
        self.bytes = 0
        self.computed = 0  # calls that were not answered from memory
        self._storages: set[int] = set()
        self._counts: Counter[str] = Counter()

    def of(self, layers: Sequence[tuple[str, nn.Module]]) -> AbstractContextManager[None]:
        """These layers answer from memory for the length of the block."""
        return standing_in([(layer, self._cached(path, layer)) for path, layer in layers])

    def _cached(self, path: str, layer: nn.Module) -> Callable[..., Any]:
        compute = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = (path, self._counts[path])
            self._counts[path] += 1
            if torch.is_grad_enabled():  # what is remembered has no graph
                return compute(*args, **kwargs)
            try:
                given, state = _freeze((args, kwargs)), self.held.of(path, layer)
            except _OpaqueError:
                return compute(*args, **kwargs)
            call = None if self.held.changing.get(path) else self.known.get(key)
            if call is None or not call.answers(state, given):
                self.computed += 1
                output = compute(*args, **kwargs)
                try:
                    # A layer that changes its inputs or itself does more than give an output.
                    if not _same(given, _freeze((args, kwargs))) or self.held.changes(path):
                        return output
                    gave = _freeze(output, mutable=False)
                    call = Call(state, given, output, gave, _storages(state, given, gave))
                except _OpaqueError:
                    return output
            self._remember(key, call)
            return call.output

        return forward

    def _remember(self, key: tuple[str, int], call: Call) -> None:
        more = {place: size for place, size in call.storages.items() if place not in self._storages}
        size = sum(more.values())
        if self.bytes + size <= self.room:
            self.calls[key] = call
            self.bytes += size
            self._storages.update(more)


def _freeze(value: Any, *, mutable: bool = True) -> Any:
    """The value as it is now, in tuples. What is handed out again must not be `mutable`."""
    if isinstance(value, torch.Tensor):
        if value.is_inference():  # such tensors do not say whether they were written to
            raise _OpaqueError
        return _Seen(value, value._version)
    if isinstance(value, PLAIN):
        return value
    if type(value) is tuple or (mutable and type(value) is list):
        return (type(value), *(_freeze(part, mutable=mutable) for part in value))
    if mutable and type(value) is dict:
        return (dict, *((name, _freeze(part)) for name, part in value.items()))
    raise _OpaqueError


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, _Seen):
        return isinstance(other, _Seen) and other.intact and one.same(other.tensor)
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _tensors(frozen: Any) -> Iterator[_Seen]:
    if isinstance(frozen, _Seen):
        yield frozen
    elif isinstance(frozen, tuple):
        for part in frozen:
            yield from _tensors(part)


def _storages(state: Sequence[tuple[Any, int]], given: Any, gave: Any) -> dict[int, int]:
    """The bytes of what a call keeps alive beside the layer's weights: what it was given, and what it gave."""
    kept = [seen.tensor for seen in (*_tensors(given), *_tensors(gave))]
    weights = {_address(part) for part, _ in state if isinstance(part, torch.Tensor)}
    return {_address(tensor): tensor.untyped_storage().nbytes() for tensor in kept if _address(tensor) not in weights}


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _state(layer: nn.Module) -> list[tuple[Any, int]]:
    """All that the modules of a layer hold: weights and buffers with their versions, children, numbers, hooks."""
    held: list[tuple[Any, int]] = []
    for module in layer.modules():
        held.append((type(module), 0))
        for name, value in vars(module).items():
            if name == "forward" and module is layer:
                continue  # what stands in for the layer's own
            held.append((name, 0))
            for part in (*value.values(), len(value)) if isinstance(value, dict) else (value,):
                tracked = isinstance(part, torch.Tensor) and not part.is_inference()
                held.append((part, part._version if tracked else 0))
    return held


def _same_state(one: list[tuple[Any, int]], other: list[tuple[Any, int]]) -> bool:
    return len(one) == len(other) and all(
        (a is b or (isinstance(a, PLAIN) and type(a) is type(b) and a == b)) and before == now
        for (a, before), (b, now) in zip(one, other, strict=True)
    )
