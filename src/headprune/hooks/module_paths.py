"""Module paths relative to one another."""

from __future__ import annotations

import re

from torch import nn


def absolute(path: str, relative: str) -> str:
    """The path of a module given relative to another one; each leading `../` goes to the parent."""
    while relative.startswith("../"):
        path, relative = path.rpartition(".")[0], relative[3:]
    return f"{path}.{relative}" if path else relative


def submodule(model: nn.Module, path: str) -> nn.Module | None:
    """The module at this path, or None."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def pattern(path: str) -> str:
    """A path with the numbers of layers and experts written as *."""
    return re.sub(r"(^|(?<=[._]))\d+(?=\.|$)", "*", path)


def layer_path(path: str) -> str:
    """The path of the layer that a site belongs to: everything up to the first number."""
    parts = path.split(".")
    position = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: position + 1])
