"""Small vocabularies, and special token ids that fit into them."""

from __future__ import annotations

from typing import Any

from .config_patterns import TOKEN, VOCAB
from .config_tree import Node
from .module_facts import special_ids

VOCABULARY = 199
# Ids below this stay the same.
LOW = 60


def reduce_vocabulary(tree: list[Node]) -> None:
    large = {value for node in tree for name, value in node.ints() if VOCAB.search(name) and value > VOCABULARY}
    if not large:
        return
    ids = sorted({value for node in tree for value in special_ids(node.old) if value >= LOW}, reverse=True)
    # From the top down, so that the last id of a vocabulary stays the last.
    new = {value: VOCABULARY - 1 - rank for rank, value in enumerate(ids)}
    for node in tree:
        for name, value in node.old.items():
            if VOCAB.search(name) and value in large:
                node.set(name, VOCABULARY)
            elif TOKEN.search(name):
                node.set(name, replace_ids(value, new))


def replace_ids(value: Any, new: dict[int, int]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(replace_ids(item, new) for item in value)
    return new.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value
