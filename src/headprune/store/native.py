"""Config numbers with which the plain class has exactly the weights of a pruned model: one for all layers, or, in
transformers' `per_layer_config`, one for each.

Which number says how wide a feed-forward layer is, each family decides for itself. It is found by trying: the plain
class is built without memory from another number, and what changed its shape is compared.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel

from headprune.units import Site
from headprune.units.cutting.record import NAMES, entries, number_of, with_numbers
from headprune.units.dense import dense_class, dense_config_class, quiet

Shapes = dict[str, tuple[int, ...]]
Numbers = dict[str, Any]  # by name, dotted inside a part of the config
PER_LAYER = "per_layer_config"
SKIPPED = {"heads": "attention", "neurons": "mlp"}  # what a layer without any of them passes by
Settings = Mapping[str, Any]


def native_numbers(model: PreTrainedModel, sites: Sequence[Site], settings: Settings) -> Numbers:
    """The numbers that a config of the dense model, `settings`, has to state instead; empty if none describe the model.

    The proof is in the shapes: the plain class is built from them and compared.
    """
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for find in (_for_all, _per_layer):
        numbers = find(model, sites, settings)
        if numbers and _shapes(model, settings, numbers) == own:
            return numbers
    return {}


def _for_all(model: PreTrainedModel, sites: Sequence[Site], settings: Settings) -> Numbers:
    numbers: Numbers = {}
    for kind, find in (("heads", _of_heads), ("neurons", _of_neurons)):
        if settings.get(NAMES[kind]):  # type: ignore[index]
            found = find(model, [site for site in sites if site.kind == kind], settings)
            if not found:
                return {}
            numbers.update(found)
    return numbers


def dense_numbers(numbers: Numbers, settings: Settings) -> dict[str, Any]:
    """What the dense config says in their place; a head width that it only implies need not come back."""
    return {name: number_of(settings, name) for name in numbers if name != "head_dim"}


def _per_layer(model: PreTrainedModel, sites: Sequence[Site], settings: Settings) -> Numbers:
    """What every layer has left, in transformers' own form for uneven ones; few classes read it yet."""
    if not any(settings.get(name) for name in NAMES.values()) or not settings.get("num_hidden_layers"):
        return {}
    layers = _layers(sites, settings)
    if layers is None:
        return {}
    known = {name for own in layers.values() for name in own} - {"skip"}
    numbers: Numbers = {}
    for name in known & settings.keys():
        found = [own.get(name) for own in layers.values()]
        if len(set(found)) == 1 and len(found) == settings["num_hidden_layers"]:
            numbers[name] = found[0]
    widths = {site.head_dim for site in sites if site.kind == "heads"}
    if "head_dim" in settings and len(widths) == 1:
        numbers["head_dim"] = widths.pop()
    overrides = {int(layer): dict(own) for layer, own in copy.deepcopy(settings.get(PER_LAYER) or {}).items()}
    for layer, own in layers.items():
        before = {name: value for name, value in overrides.get(layer, {}).items() if name not in known}
        overrides[layer] = {**before, **{name: value for name, value in own.items() if name not in numbers}}
    digits = len(str(max(overrides)))  # so that a sorted file has them in their order
    numbers[PER_LAYER] = {str(layer).zfill(digits): overrides[layer] for layer in sorted(overrides) if overrides[layer]}
    return numbers


def _layers(sites: Sequence[Site], settings: Settings) -> dict[int, dict[str, Any]] | None:
    """Layer -> what it has left; None where a layer has several sites of a kind, or a site belongs to none."""
    found: dict[int, dict[str, Any]] = {}
    for site in sites:
        number = re.search(r"\.(\d+)\.", f".{site.path}.")
        if number is None or not 0 <= int(number[1]) < settings["num_hidden_layers"]:
            return None
        own = found.setdefault(int(number[1]), {})
        if site.kind == "heads":
            left = {"num_attention_heads": site.heads, "num_key_value_heads": site.kv_heads}
        else:
            left = {"intermediate_size": site.size}
        left = {name: value for name, value in left.items() if settings.get(name) is not None}
        if left.keys() & own.keys() or SKIPPED[site.kind] in own.get("skip", ()):
            return None
        if site.kept:
            own.update(left)
        else:
            own["skip"] = sorted([*own.get("skip", ()), SKIPPED[site.kind]])
    return found


def _of_heads(model: PreTrainedModel, sites: Sequence[Site], settings: Settings) -> Numbers:
    """The same heads everywhere, in a family whose config has a head width of its own."""
    if len({(site.heads, site.kv_heads, site.head_dim) for site in sites}) != 1:
        return {}
    site = sites[0]
    if not site.kept or "num_attention_heads" not in settings:
        return {}
    counts = {"num_attention_heads": site.heads, "head_dim": site.head_dim}
    if settings.get("num_key_value_heads") is not None:
        counts["num_key_value_heads"] = site.kv_heads
    return counts


def _of_neurons(model: PreTrainedModel, sites: Sequence[Site], settings: Settings) -> Numbers:
    """One number for all layers that follow it, where these have one width."""
    if not all(site.kept for site in sites):
        return {}
    dense = _shapes(model, settings, {})
    waiting = {site.index for site in sites if site.size < site.original}
    widths = {site.original for site in sites}
    other = max(site.size for site in sites if site.index in waiting)
    numbers: Numbers = {}
    for name in _candidates(model, settings, widths):
        if not waiting or dense is None:
            break
        following = _following(dense, _shapes(model, settings, {name: other}), sites, other)
        wanted = {site.size for site in following}
        if not waiting & {site.index for site in following}:
            continue
        if len(wanted) != 1:
            return {}
        numbers[name] = wanted.pop()
        waiting -= {site.index for site in following}
    return {} if waiting else numbers


def _following(dense: Shapes, tried: Shapes | None, layers: Sequence[Site], width: int) -> list[Site]:
    """The layers that have this width now; none where anything else has changed as well."""
    if tried is None or tried.keys() != dense.keys():
        return []
    changed = {name for name in dense if dense[name] != tried[name]}
    own = [site for site in layers if site.axes[-1].tensor in changed]
    right = all(tried[site.axes[-1].tensor][site.axes[-1].dim] == width for site in own)
    return own if right and changed <= {axis.tensor for site in own for axis in site.axes} else []


def _candidates(model: PreTrainedModel, settings: Settings, widths: Collection[int]) -> Iterator[str]:
    """Numbers of the config that are such a width, then those that are not stated (GPT-2's `n_inner`)."""
    stated = list(entries(dense_config_class(model).from_dict(dict(settings)).to_dict()))
    yield from (name for name, value in stated if type(value) is int and value in widths)
    yield from (name for name, value in stated if value is None)


def _shapes(model: PreTrainedModel, settings: Settings, numbers: Numbers) -> Shapes | None:
    """Of all that the plain class would save with these numbers; None where it does not take them."""
    try:
        with torch.device("meta"), quiet():
            plain = dense_class(model)(dense_config_class(model).from_dict(with_numbers(settings, numbers)))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ArithmeticError, StrictDataclassError):
        return None  # some sizes exclude one another, some entries are no numbers
    return {name: tuple(tensor.shape) for name, tensor in plain.state_dict().items()}
