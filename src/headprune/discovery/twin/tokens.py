"""Vocabularies, and the ids of special tokens below them."""

from __future__ import annotations

from typing import Any

from .config_patterns import TOKEN, VOCAB
from .config_tree import Node

VOCABULARY = 199
# Ids below stay what they are.
LOW = 60


def reduce_vocabulary(tree: list[Node]) -> None:
    large = {value for node in tree for name, value in node.ints() if VOCAB.search(name) and value > VOCABULARY}
    if not large:
        return
    ids = sorted({value for node in tree for value in token_ids(node) if value >= LOW}, reverse=True)
    # From the top down, so that what was the last of a vocabulary is the last again.
    new = {value: VOCABULARY - 1 - place for place, value in enumerate(ids)}
    for node in tree:
        for name, value in node.old.items():
            if VOCAB.search(name) and value in large:
                node.set(name, VOCABULARY)
            elif TOKEN.search(name):
                node.set(name, replaced(value, new))


def token_ids(node: Node) -> list[int]:
    found = []
    for name, value in node.old.items():
        if TOKEN.search(name):
            for one in value if isinstance(value, list | tuple) else [value]:
                if isinstance(one, int) and not isinstance(one, bool):
                    found.append(one)
    return found


def replaced(value: Any, new: dict[int, int]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(replaced(one, new) for one in value)
    return new.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value
