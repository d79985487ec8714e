"""What no rule says: values by type of model, as `Node.set` puts them."""

from __future__ import annotations

from typing import Any

from .tree import Node

EXCEPTIONS: dict[str, dict[str, Any]] = {
}


def apply_exceptions(tree: list[Node]) -> None:
    for node in tree:
        for name, value in EXCEPTIONS.get(node.model_type, {}).items():
            node.set(name, value)
