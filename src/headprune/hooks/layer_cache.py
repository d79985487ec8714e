"""A cache of the outputs of layers, for calls with the same inputs.

Nothing is assumed about the order in which layers run, how often they run, or what lies between them. An output is
taken from the cache only if the layer itself (its weights, and all its attributes) and all its inputs are what they
were; whatever changed anywhere in the model reaches a layer through one of these.
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
from headprune.hooks.layer_calls import replace_forwards
from headprune.hooks.module_paths import layer_path

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)


def cacheable_layers(model: nn.Module, sites: Sequence[HookedSite]) -> list[tuple[str, nn.Module]]:
    """The layers of these sites, by path. A layer that runs several times in a pass (ALBERT's) changes as a whole, if
    it does, and would only fill the memory."""
    again = {layer_path(site.path) for site in sites if site.applications > 1}
    paths = dict.fromkeys(layer_path(site.path) for site in sites)
    return [(path, model.get_submodule(path)) for path in paths if path not in again]


class _OpaqueError(Exception):
    """A value that may change unnoticed, such as a KV cache."""


@dataclass(frozen=True)
class _TensorVersion:
    """A tensor and its version, which changes when it is written to."""

    tensor: torch.Tensor
    version: int

    @property
    def unchanged(self) -> bool:
        return self.tensor._version == self.version

    def same(self, other: torch.Tensor) -> bool:
        if not self.unchanged or self.tensor.shape != other.shape:
            return False
        if self.tensor is other:
            return True
        same_kind = (self.tensor.dtype, self.tensor.device) == (other.dtype, other.device)
        return same_kind and torch.equal(self.tensor, other)


@dataclass(frozen=True)
class CachedCall:
    """One call of a layer: the state of the layer, its inputs, and its outputs."""

    state: list[tuple[Any, int]]
    inputs: Any
    output: Any
    outputs: Any
    storages: Mapping[int, int]  # the bytes of each that it keeps alive, by address

    def matches(self, state: list[tuple[Any, int]], inputs: Any) -> bool:
        return (
            _same_state(self.state, state)
            and _same(self.inputs, inputs)
            and all(t.unchanged for t in _tensors(self.outputs))
        )


CallKey = tuple[str, int]  # the path of a layer, and the number of its calls before in this pass
Calls = dict[CallKey, CachedCall]


class LayerStates:
    """The states of layers, read once for all batches: reading one takes as long as running a small layer.

    A layer that changes itself is noticed when it first computes, or at the latest by `unchanged` at the end.
    """

    def __init__(self) -> None:
        self._states: dict[str, list[tuple[Any, int]]] = {}
        self._layers: dict[str, nn.Module] = {}
        self.changing: dict[str, bool] = {}  # whether a layer changes itself when it computes

    def of(self, path: str, layer: nn.Module) -> list[tuple[Any, int]]:
        if path not in self._states:
            self._states[path], self._layers[path] = _state(layer), layer
        return self._states[path]

    def changes(self, path: str) -> bool:
        """Whether the layer, which has just computed, has changed itself."""
        if path not in self.changing:
            self.changing[path] = not self._same(path)
        return self.changing[path]

    def unchanged(self) -> bool:
        """Whether all layers are in the state that they were in; otherwise cached outputs may be wrong."""
        return all(self._same(path) for path in self._states if not self.changing.get(path))

    def _same(self, path: str) -> bool:
        return _same_state(self._states[path], _state(self._layers[path]))


class LayerCache:
    """Returns outputs of layers from an `earlier` pass over the same batch, and caches those of this one, within
    `limit` bytes. Passes over several batches may share the `states` of layers. With gradients enabled every layer
    computes.
    """

    def __init__(self, earlier: Mapping[CallKey, CachedCall], limit: int, states: LayerStates | None = None) -> None:
        self.earlier = earlier
        self.limit = limit
        self.states = states or LayerStates()
        self.calls: Calls = {}
        self.bytes = 0
        self.computed = 0  # calls that were not cached
        self._storages: set[int] = set()
        self._counts: Counter[str] = Counter()

    def of(self, layers: Sequence[tuple[str, nn.Module]]) -> AbstractContextManager[None]:
        """Cached outputs of these layers within a block."""
        return replace_forwards([(layer, self._cached(path, layer)) for path, layer in layers])

    def _cached(self, path: str, layer: nn.Module) -> Callable[..., Any]:
        compute = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = (path, self._counts[path])
            self._counts[path] += 1
            if torch.is_grad_enabled():  # cached outputs have no graph
                return compute(*args, **kwargs)
            try:
                inputs, state = _freeze((args, kwargs)), self.states.of(path, layer)
            except _OpaqueError:
                return compute(*args, **kwargs)
            call = None if self.states.changing.get(path) else self.earlier.get(key)
            if call is None or not call.matches(state, inputs):
                self.computed += 1
                output = compute(*args, **kwargs)
                try:
                    # A layer that changes its inputs or itself cannot be replaced by its output.
                    if not _same(inputs, _freeze((args, kwargs))) or self.states.changes(path):
                        return output
                    outputs = _freeze(output, mutable=False)
                    call = CachedCall(state, inputs, output, outputs, _storages(state, inputs, outputs))
                except _OpaqueError:
                    return output
            self._store(key, call)
            return call.output

        return forward

    def _store(self, key: CallKey, call: CachedCall) -> None:
        added = {pointer: size for pointer, size in call.storages.items() if pointer not in self._storages}
        size = sum(added.values())
        if self.bytes + size <= self.limit:
            self.calls[key] = call
            self.bytes += size
            self._storages.update(added)


def _freeze(value: Any, *, mutable: bool = True) -> Any:
    """The value as it is now, in tuples; outputs, which are handed out again, must not be `mutable`."""
    if isinstance(value, torch.Tensor):
        if value.is_inference():  # such tensors have no version
            raise _OpaqueError
        return _TensorVersion(value, value._version)
    if isinstance(value, PLAIN):
        return value
    if type(value) is tuple or (mutable and type(value) is list):
        return (type(value), *(_freeze(part, mutable=mutable) for part in value))
    if mutable and type(value) is dict:
        return (dict, *((name, _freeze(part)) for name, part in value.items()))
    raise _OpaqueError


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, _TensorVersion):
        return isinstance(other, _TensorVersion) and other.unchanged and one.same(other.tensor)
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _tensors(frozen: Any) -> Iterator[_TensorVersion]:
    if isinstance(frozen, _TensorVersion):
        yield frozen
    elif isinstance(frozen, tuple):
        for part in frozen:
            yield from _tensors(part)


def _storages(state: Sequence[tuple[Any, int]], inputs: Any, outputs: Any) -> dict[int, int]:
    """The bytes that a call keeps alive beside the weights of the layer: its inputs and outputs."""
    tensors = [part.tensor for part in (*_tensors(inputs), *_tensors(outputs))]
    weights = {_address(part) for part, _ in state if isinstance(part, torch.Tensor)}
    return {
        _address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors if _address(tensor) not in weights
    }


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _state(layer: nn.Module) -> list[tuple[Any, int]]:
    """All attributes of the modules of a layer: weights and buffers with their versions, children, numbers, hooks."""
    state: list[tuple[Any, int]] = []
    for module in layer.modules():
        state.append((type(module), 0))
        for name, value in vars(module).items():
            if name == "forward" and module is layer:
                continue  # the replacement of the layer's forward
            state.append((name, 0))
            for part in (*value.values(), len(value)) if isinstance(value, dict) else (value,):
                tracked = isinstance(part, torch.Tensor) and not part.is_inference()
                state.append((part, part._version if tracked else 0))
    return state


def _same_state(one: list[tuple[Any, int]], other: list[tuple[Any, int]]) -> bool:
    return len(one) == len(other) and all(
        (a is b or (isinstance(a, PLAIN) and type(a) is type(b) and a == b)) and before == now
        for (a, before), (b, now) in zip(one, other, strict=True)
    )
