"""From a shallow twin to a deep model: layers of the same kind are alike, so what holds for one holds for all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from headprune.discovery.dense_site import DenseSite
from headprune.discovery.twin import attention_modules
from headprune.units.cutting.plan import KV_COUNTS, QUERY_COUNTS

COUNTS = (*QUERY_COUNTS, *KV_COUNTS)


def is_uniform(config: Any) -> bool:
    """Whether a config gives all layers of a kind the same heads, as far as it says."""
    parts = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]
    for part in parts:
        values = vars(part)
        if values.get("_heterogeneity_spec") is not None:
            return False
        if any("head" in name and isinstance(value, (list, tuple)) for name, value in values.items()):
            return False
    return True


def deepened(
    sites: Sequence[DenseSite], left: Sequence[tuple[str, str]], twin: nn.Module, model: nn.Module
) -> tuple[list[DenseSite], list[tuple[str, str]]]:
    """Sites of the model (its structure is all that is looked at), each from one of its kind in the twin."""
    known: dict[Any, DenseSite] = {_kind(twin, site.path): site for site in sites}
    refused = {_kind(twin, path): reason for path, reason in left}
    found: list[DenseSite] = []
    whole: list[tuple[str, str]] = []
    for path in attention_modules(model):
        kind = _kind(model, path)
        if kind in refused:  # one of its kind cannot be pruned, whatever holds for others
            whole.append((path, refused[kind]))
        elif kind in known:
            found.append(_at(known[kind], path))
        elif not any(_pattern(path).startswith(_pattern(site.path) + ".") for site in sites):
            whole.append((path, "its small twin has no layer of this kind"))
    return found, whole


def _pattern(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _kind(model: nn.Module, path: str) -> Any:
    """Where it is but for the number of its layer, its class, what it holds, and what it says about its heads."""
    module = model.get_submodule(path)
    tensors = tuple((name, tensor.dim()) for name, tensor in module.named_parameters())
    values = module.__dict__.items()
    said = tuple(sorted((n, v) for n, v in values if type(v) is bool or (type(v) is int and n in COUNTS)))
    return _pattern(path), type(module), tensors, said


def _at(site: DenseSite, path: str) -> DenseSite:
    """The same site in another layer: the numbers in all its paths change with it."""
    old = [part for part in site.path.split(".") if part.isdigit()]
    new = [part for part in path.split(".") if part.isdigit()]

    def moved(other: str) -> str:
        shared = site.path.split(".")
        parts = other.split(".")
        place = 0
        for number, part in enumerate(parts):
            if number < len(shared) and part == shared[number]:
                if part.isdigit():
                    parts[number] = new[place]
                    place += 1
            else:
                break
        return ".".join(parts)

    if old == new:
        return replace(site, path=path)
    return replace(
        site,
        path=path,
        o=moved(site.o),
        maps=tuple(moved(name) for name in site.maps),
        kinds=tuple((moved(name), kind) for name, kind in site.kinds),
    )
