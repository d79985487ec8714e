"""Extends the sites of a shallow twin to all layers of a deep model: layers of the same kind have the same layout."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from headprune.discovery.sites_from_layouts import DenseSite
from headprune.discovery.twin import attention_modules
from headprune.units.slicing.plan import KV_COUNTS, QUERY_COUNTS

COUNTS = (*QUERY_COUNTS, *KV_COUNTS)


def is_uniform(config: Any) -> bool:
    """Whether a config has the same head counts for all layers."""
    parts = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]
    for part in parts:
        values = vars(part)
        if values.get("_heterogeneity_spec") is not None:
            return False
        if any("head" in name and isinstance(value, (list, tuple)) for name, value in values.items()):
            return False
    return True


def extend_to_all_layers(
    sites: Sequence[DenseSite], skipped: Sequence[tuple[str, str]], twin: nn.Module, model: nn.Module
) -> tuple[list[DenseSite], list[tuple[str, str]]]:
    """Sites of the model (only its structure is read), each copied from a site of the same kind in the twin."""
    site_of_kind: dict[Any, DenseSite] = {_kind(twin, site.path): site for site in sites}
    reason_of_kind = {_kind(twin, path): reason for path, reason in skipped}
    extended: list[DenseSite] = []
    unmatched: list[tuple[str, str]] = []
    for path in attention_modules(model):
        kind = _kind(model, path)
        if kind in reason_of_kind:  # a module of this kind cannot be pruned in the twin, whatever holds for others
            unmatched.append((path, reason_of_kind[kind]))
        elif kind in site_of_kind:
            extended.append(_in_layer(site_of_kind[kind], path))
        elif not any(_pattern(path).startswith(_pattern(site.path) + ".") for site in sites):
            unmatched.append((path, "its small twin has no layer of this kind"))
    return extended, unmatched


def _pattern(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _kind(model: nn.Module, path: str) -> Any:
    """The path without layer numbers, the class, the parameters, and the head counts among the attributes."""
    module = model.get_submodule(path)
    tensors = tuple((name, tensor.dim()) for name, tensor in module.named_parameters())
    values = module.__dict__.items()
    attributes = tuple(sorted((n, v) for n, v in values if type(v) is bool or (type(v) is int and n in COUNTS)))
    return _pattern(path), type(module), tensors, attributes


def _in_layer(site: DenseSite, path: str) -> DenseSite:
    """The same site in another layer: the layer numbers in all its paths change."""
    old = [part for part in site.path.split(".") if part.isdigit()]
    new = [part for part in path.split(".") if part.isdigit()]

    def renumber(name: str) -> str:
        shared = site.path.split(".")
        parts = name.split(".")
        position = 0
        for number, part in enumerate(parts):
            if number < len(shared) and part == shared[number]:
                if part.isdigit():
                    parts[number] = new[position]
                    position += 1
            else:
                break
        return ".".join(parts)

    if old == new:
        return replace(site, path=path)
    return replace(
        site,
        path=path,
        o=renumber(site.o),
        maps=tuple(renumber(name) for name in site.maps),
        kinds=tuple((renumber(name), kind) for name, kind in site.kinds),
    )
