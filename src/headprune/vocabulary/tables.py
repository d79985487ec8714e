"""What of a model has a row per token, found by building its class twice: with the old number of tokens and the new.

Nothing is known by name. Tensors whose shapes differ between the two have the vocabulary as the axis that differs, and
attributes that differ (sizes, the padding token) follow from the config; what comes out is what the class expects of a
config with the new number, so plain transformers loads it.
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
from headprune.units.dense import dense_class, quiet


@dataclass(frozen=True)
class Tables:
    """Axes of tensors that are the vocabulary, by name, and values of attributes, by module and name."""

    axes: Mapping[str, Sequence[int]]
    attributes: Mapping[tuple[str, str], tuple[Any, Any]]


def rows_of(model: PreTrainedModel) -> int:
    """The number of tokens that the model has embeddings for."""
    name = type(model).__name__
    try:
        found = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        found = None
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    if not isinstance(found, nn.Embedding) or size is None:
        raise VocabularyError(f"{name} has no table of token embeddings, so it has no vocabulary to make smaller.")
    if found.weight.shape[0] != size:
        raise VocabularyError(
            f"{name} has embeddings for {found.weight.shape[0]} tokens and a config for {size}; resize one of them "
            "with model.resize_token_embeddings first."
        )
    return int(size)


def find_tables(model: PreTrainedModel, after: Any, before: int, left: int) -> Tables:
    """Compare the class as built from the model's config and from `after`, the one with `left` tokens."""
    old, new = _skeleton(model, model.config), _skeleton(model, after)
    shapes = {name: tensor.shape for name, tensor in _tensors(old)}
    axes: dict[str, Sequence[int]] = {}
    for name, tensor in _tensors(new):
        was = shapes.get(name, torch.Size())
        if was == tensor.shape:
            continue
        places = [place for place, (one, other) in enumerate(zip(was, tensor.shape, strict=False)) if one != other]
        whole = len(was) == tensor.dim() and all((was[p], tensor.shape[p]) == (before, left) for p in places)
        if not whole or tuple(_tensor(model, name).shape[p] for p in places) != (before,) * len(places):
            raise VocabularyError(
                f"{type(model).__name__} has a tensor {name} that depends on the vocabulary in another way than a row "
                "per token, so it cannot be made smaller here."
            )
        axes[name] = places
    return Tables(axes, _attributes(model, old, new))


def apply_tables(model: PreTrainedModel, tables: Tables, kept: Sequence[int]) -> None:
    """Keep these rows. A tensor that has several names, as tied ones do, is replaced by one under all of them."""
    made: dict[int, torch.Tensor] = {}
    for name, axes in tables.axes.items():
        old = _tensor(model, name)
        if id(old) not in made:
            fresh = old.detach()
            for axis in axes:
                fresh = fresh.index_select(axis, torch.tensor(kept, device=old.device))
            is_parameter = isinstance(old, nn.Parameter)
            made[id(old)] = nn.Parameter(fresh, requires_grad=old.requires_grad) if is_parameter else fresh
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        (owner._parameters if leaf in owner._parameters else owner._buffers)[leaf] = made[id(old)]
    for (path, name), (_, value) in tables.attributes.items():
        setattr(model.get_submodule(path), name, value)


def _skeleton(model: PreTrainedModel, config: Any) -> nn.Module:
    """The class built from a config, without memory."""
    try:
        with torch.device("meta"), quiet():
            made: nn.Module = dense_class(model)(copy.deepcopy(config))
    except Exception as error:  # whatever a class says to a number of tokens that it did not expect
        reason = " ".join(str(error).split())[:200]
        raise VocabularyError(
            f"{type(model).__name__} cannot be built with another vocabulary ({reason}), so its own stays."
        ) from None
    return made


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    try:
        owner = model.get_submodule(path)
        found = owner._parameters.get(leaf, owner._buffers.get(leaf))
    except AttributeError:
        found = None
    if found is None or found.is_meta:
        raise VocabularyError(
            f"{type(model).__name__} has no weights for {name}, which its class has; load all of them, and no adapters."
        )
    return found


def _attributes(model: nn.Module, old: nn.Module, new: nn.Module) -> dict[tuple[str, str], tuple[Any, Any]]:
    """Numbers that modules took from the config when they were built."""
    found: dict[tuple[str, str], tuple[Any, Any]] = {}
    own, others = dict(model.named_modules()), dict(new.named_modules())
    for path, module in old.named_modules():
        if path not in own or path not in others:  # a site that has no heads left
            continue
        for name, value in vars(module).items():
            other = vars(others[path]).get(name)
            if not isinstance(value, (int, list, tuple)) or type(other) is not type(value) or other == value:
                continue
            if vars(own[path]).get(name) == value:
                found[path, name] = (value, other)
    return found
