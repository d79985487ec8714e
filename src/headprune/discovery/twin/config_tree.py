"""Nested configs as a tree of nodes."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from transformers import PretrainedConfig


class Node:
    """One config of the tree, with its original values in `old`."""

    def __init__(self, config: PretrainedConfig, path: str) -> None:
        self.config = config
        self.path = path
        self.old = {name: value for name, value in vars(config).items() if not name.startswith("_")}

    @property
    def model_type(self) -> str:
        return str(getattr(self.config, "model_type", ""))

    def ints(self) -> Iterator[tuple[str, int]]:
        for name, value in self.old.items():
            if isinstance(value, int) and not isinstance(value, bool):
                yield name, value

    def lists(self) -> Iterator[tuple[str, list[Any]]]:
        for name, value in self.old.items():
            if isinstance(value, list | tuple) and len(value):
                yield name, list(value)

    def get(self, *names: str) -> Any:
        """The original value of the first of these names that has one."""
        return next((self.old[name] for name in names if self.old.get(name) is not None), None)

    def current(self, name: str) -> Any:
        return vars(self.config).get(name)

    def set(self, name: str, value: Any) -> None:
        """Set a value without the validation of the config class: values fit together only when all are reduced."""
        if isinstance(self.old.get(name), tuple) and isinstance(value, list):
            value = tuple(value)
        vars(self.config)[name] = value


def nodes(config: PretrainedConfig, path: str = "", visited: set[int] | None = None) -> Iterator[Node]:
    """The config and all nested configs, each once."""
    visited = set() if visited is None else visited
    if id(config) in visited:
        return
    visited.add(id(config))
    yield Node(config, path)
    for name, value in list(vars(config).items()):
        for inner in value if isinstance(value, list | tuple) else [value]:
            if isinstance(inner, PretrainedConfig):
                yield from nodes(inner, f"{path}.{name}" if path else name, visited)


def mappings(value: Any) -> Iterator[MutableMapping[str, Any]]:
    """A dictionary and all dictionaries nested in it."""
    if isinstance(value, MutableMapping):
        yield value
        for inner in value.values():
            yield from mappings(inner)
