"""Finds the tensors with a row per token by building the class twice: with the old number of tokens and the new.

No names of modules are assumed. Where the shapes of a tensor differ between the two, the axis that differs is the
vocabulary, and attributes that differ (sizes, the padding token) follow from the config; the result is what the class
builds from a config with the new number, so plain transformers loads it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.errors import VocabularyError
from headprune.units.dense_model import dense_class, quiet


@dataclass(frozen=True)
class Tables:
    """Vocabulary axes by tensor name, and (old, new) values of attributes by module path and name."""

    axes: Mapping[str, Sequence[int]]
    attributes: Mapping[tuple[str, str], tuple[Any, Any]]


def rows_of(model: PreTrainedModel) -> int:
    """The number of rows of the token embeddings of the model."""
    name = type(model).__name__
    try:
        embeddings = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        embeddings = None
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    if not isinstance(embeddings, nn.Embedding) or size is None:
        raise VocabularyError(
            f"{name} has no table of token embeddings, so there is no vocabulary to shrink; give a text model."
        )
    if embeddings.weight.shape[0] != size:
        raise VocabularyError(
            f"{name} has embeddings for {embeddings.weight.shape[0]} tokens and a config for {size}; resize one of "
            "them with model.resize_token_embeddings first."
        )
    return int(size)


def find_tables(model: PreTrainedModel, after: Any, before: int, count: int) -> Tables:
    """Compare the class built from the model's config with the class built from `after`, which has `count` tokens."""
    old, new = _skeleton(model, model.config), _skeleton(model, after)
    shapes = {name: tensor.shape for name, tensor in _tensors(old)}
    axes: dict[str, Sequence[int]] = {}
    for name, tensor in _tensors(new):
        old_shape = shapes.get(name, torch.Size())
        if old_shape == tensor.shape:
            continue
        differing = [
            axis
            for axis, (old_size, new_size) in enumerate(zip(old_shape, tensor.shape, strict=False))
            if old_size != new_size
        ]
        only_vocabulary = len(old_shape) == tensor.dim() and all(
            (old_shape[axis], tensor.shape[axis]) == (before, count) for axis in differing
        )
        if not only_vocabulary or tuple(_tensor(model, name).shape[axis] for axis in differing) != (before,) * len(
            differing
        ):
            raise VocabularyError(
                f"{type(model).__name__} has a tensor {name} that depends on the vocabulary in another way than a row "
                "per token, so its vocabulary cannot be shrunk; keep all of it."
            )
        axes[name] = differing
    return Tables(axes, _attributes(model, old, new))


def apply_tables(model: PreTrainedModel, tables: Tables, token_ids: Sequence[int]) -> None:
    """Keep these rows. A tied tensor is replaced by one tensor under all its names."""
    replacements: dict[int, torch.Tensor] = {}
    for name, axes in tables.axes.items():
        old = _tensor(model, name)
        if id(old) not in replacements:
            rows = old.detach()
            for axis in axes:
                rows = rows.index_select(axis, torch.tensor(token_ids, device=old.device))
            is_parameter = isinstance(old, nn.Parameter)
            replacements[id(old)] = nn.Parameter(rows, requires_grad=old.requires_grad) if is_parameter else rows
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        (owner._parameters if leaf in owner._parameters else owner._buffers)[leaf] = replacements[id(old)]
    for (path, name), (_, value) in tables.attributes.items():
        setattr(model.get_submodule(path), name, value)


def _skeleton(model: PreTrainedModel, config: Any) -> nn.Module:
    """The class built from a config on the meta device."""
    try:
        with torch.device("meta"), quiet():
            skeleton: nn.Module = dense_class(model)(copy.deepcopy(config))
    except Exception as error:  # a class may raise any error for another number of tokens
        reason = " ".join(str(error).split())[:200]
        raise VocabularyError(
            f"{type(model).__name__} cannot be built with another vocabulary size ({reason}); keep its "
            "whole vocabulary."
        ) from None
    return skeleton


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    try:
        owner = model.get_submodule(path)
        tensor = owner._parameters.get(leaf, owner._buffers.get(leaf))
    except AttributeError:
        tensor = None
    if tensor is None or tensor.is_meta:
        raise VocabularyError(
            f"{type(model).__name__} has no weights for {name}; load the whole model, without adapters."
        )
    return tensor


def _attributes(model: nn.Module, old: nn.Module, new: nn.Module) -> dict[tuple[str, str], tuple[Any, Any]]:
    """Attributes that modules copied from the config, with their old and new values."""
    changes: dict[tuple[str, str], tuple[Any, Any]] = {}
    modules, new_modules = dict(model.named_modules()), dict(new.named_modules())
    for path, module in old.named_modules():
        if path not in modules or path not in new_modules:  # a site without heads
            continue
        for name, value in vars(module).items():
            new_value = vars(new_modules[path]).get(name)
            if not isinstance(value, (int, list, tuple)) or type(new_value) is not type(value) or new_value == value:
                continue
            if vars(modules[path]).get(name) == value:
                changes[path, name] = (value, new_value)
    return changes
