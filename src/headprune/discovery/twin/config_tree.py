"""Configs as trees: a node is a config or a dictionary in it that describes a part of the model."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from transformers import PretrainedConfig


class Node:
    """One config of the tree, with the values that it had before anything was reduced."""

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
        """The value as it was under the first of these names that has one."""
        return next((self.old[name] for name in names if self.old.get(name) is not None), None)

    def now(self, name: str) -> Any:
        return vars(self.config).get(name)

    def set(self, name: str, value: Any) -> None:
        """Past the checks of the class: values of a tree change one at a time, and fit together only at the end."""
        if isinstance(self.old.get(name), tuple) and isinstance(value, list):
            value = tuple(value)
        vars(self.config)[name] = value


def nodes(config: PretrainedConfig, path: str = "", seen: set[int] | None = None) -> Iterator[Node]:
    """The config and all configs inside, each once."""
    seen = set() if seen is None else seen
    if id(config) in seen:
        return
    seen.add(id(config))
    yield Node(config, path)
    for name, value in list(vars(config).items()):
        for inner in value if isinstance(value, list | tuple) else [value]:
            if isinstance(inner, PretrainedConfig):
                yield from nodes(inner, f"{path}.{name}" if path else name, seen)


def mappings(value: Any) -> Iterator[MutableMapping[str, Any]]:
    """A dictionary and those inside of it."""
    if isinstance(value, MutableMapping):
        yield value
        for inner in value.values():
            yield from mappings(inner)
