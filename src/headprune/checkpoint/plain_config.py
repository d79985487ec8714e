"""Config numbers with which the plain class has exactly the weights of a pruned model: one for all layers, or, in
transformers' `per_layer_config`, one for each.

Families have different names for the width of a feed-forward layer. The name is found by trial: the plain class is
built on the meta device with another number, and the shapes that change are compared.
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
from headprune.units.dense_model import dense_class, dense_config_class, quiet
from headprune.units.slicing.record import NAMES, entries, number_of, with_numbers

Shapes = dict[str, tuple[int, ...]]
Numbers = dict[str, Any]  # by name, dotted inside a nested config
PER_LAYER = "per_layer_config"
SKIPPED = {"heads": "attention", "neurons": "mlp"}  # what a layer without any of them skips
Settings = Mapping[str, Any]


def plain_numbers(model: PreTrainedModel, sites: Sequence[Site], settings: Settings) -> Numbers:
    """The numbers that replace those in the config of the dense model, `settings`; empty if none describe the pruned
    model.

    They are checked by building the plain class with them and comparing all shapes.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for find in (_uniform_numbers, _per_layer_numbers):
        numbers = find(model, sites, settings)
        if numbers and _shapes(model, settings, numbers) == shapes:
            return numbers
    return {}


def _uniform_numbers(model: PreTrainedModel, sites: Sequence[Site], settings: Settings) -> Numbers:
    numbers: Numbers = {}
    for kind, find in (("heads", _head_numbers), ("neurons", _neuron_numbers)):
        if settings.get(NAMES[kind]):  # type: ignore[index]
            numbers_of_kind = find(model, [site for site in sites if site.kind == kind], settings)
            if not numbers_of_kind:
                return {}
            numbers.update(numbers_of_kind)
    return numbers


def dense_numbers(numbers: Numbers, settings: Settings) -> dict[str, Any]:
    """The values of these numbers in the dense config; a head width that it only implies is left out."""
    return {name: number_of(settings, name) for name in numbers if name != "head_dim"}


def _per_layer_numbers(model: PreTrainedModel, sites: Sequence[Site], settings: Settings) -> Numbers:
    """The counts of every layer in transformers' `per_layer_config`, which few classes read yet."""
    if not any(settings.get(name) for name in NAMES.values()) or not settings.get("num_hidden_layers"):
        return {}
    layers = _layers(sites, settings)
    if layers is None:
        return {}
    names = {name for overrides_of_layer in layers.values() for name in overrides_of_layer} - {"skip"}
    numbers: Numbers = {}
    for name in names & settings.keys():
        values = [overrides_of_layer.get(name) for overrides_of_layer in layers.values()]
        if len(set(values)) == 1 and len(values) == settings["num_hidden_layers"]:
            numbers[name] = values[0]
    widths = {site.head_dim for site in sites if site.kind == "heads"}
    if "head_dim" in settings and len(widths) == 1:
        numbers["head_dim"] = widths.pop()
    overrides = {
        int(layer): dict(overrides_of_layer)
        for layer, overrides_of_layer in copy.deepcopy(settings.get(PER_LAYER) or {}).items()
    }
    for layer, overrides_of_layer in layers.items():
        before = {name: value for name, value in overrides.get(layer, {}).items() if name not in names}
        overrides[layer] = {
            **before,
            **{name: value for name, value in overrides_of_layer.items() if name not in numbers},
        }
    digits = len(str(max(overrides)))  # so that they are in order in a sorted file
    numbers[PER_LAYER] = {str(layer).zfill(digits): overrides[layer] for layer in sorted(overrides) if overrides[layer]}
    return numbers


def _layers(sites: Sequence[Site], settings: Settings) -> dict[int, dict[str, Any]] | None:
    """Layer -> its counts; None where a layer has several sites of a kind, or a site belongs to none."""
    layers: dict[int, dict[str, Any]] = {}
    if not isinstance(settings["num_hidden_layers"], int):  # LXMERT has a number per stack
        return None
    for site in sites:
        number = re.search(r"\.(\d+)\.", f".{site.path}.")
        if number is None or not 0 <= int(number[1]) < settings["num_hidden_layers"]:
            return None
        overrides = layers.setdefault(int(number[1]), {})
        if site.kind == "heads":
            counts = {"num_attention_heads": site.heads, "num_key_value_heads": site.kv_heads}
        else:
            counts = {"intermediate_size": site.size}
        counts = {name: value for name, value in counts.items() if settings.get(name) is not None}
        if counts.keys() & overrides.keys() or SKIPPED[site.kind] in overrides.get("skip", ()):
            return None
        if site.kept:
            overrides.update(counts)
        else:
            overrides["skip"] = sorted([*overrides.get("skip", ()), SKIPPED[site.kind]])
    return layers


def _head_numbers(model: PreTrainedModel, sites: Sequence[Site], settings: Settings) -> Numbers:
    """The counts where all layers have the same, in a family whose config has the number of heads."""
    if len({(site.heads, site.kv_heads, site.head_dim) for site in sites}) != 1:
        return {}
    site = sites[0]
    if not site.kept or "num_attention_heads" not in settings:
        return {}
    counts = {"num_attention_heads": site.heads, "head_dim": site.head_dim}
    if settings.get("num_key_value_heads") is not None:
        counts["num_key_value_heads"] = site.kv_heads
    return counts


def _neuron_numbers(model: PreTrainedModel, sites: Sequence[Site], settings: Settings) -> Numbers:
    """One number for all layers that depend on it, where these have one width."""
    if not all(site.kept for site in sites):
        return {}
    dense = _shapes(model, settings, {})
    unexplained = {site.index for site in sites if site.size < site.original}
    widths = {site.original for site in sites}
    other = max(site.size for site in sites if site.index in unexplained)
    numbers: Numbers = {}
    for name in _candidates(model, settings, widths):
        if not unexplained or dense is None:
            break
        dependent = _dependent_sites(dense, _shapes(model, settings, {name: other}), sites, other)
        widths = {site.size for site in dependent}
        if not unexplained & {site.index for site in dependent}:
            continue
        if len(widths) != 1:
            return {}
        numbers[name] = widths.pop()
        unexplained -= {site.index for site in dependent}
    return {} if unexplained else numbers


def _dependent_sites(dense: Shapes, trial: Shapes | None, layers: Sequence[Site], width: int) -> list[Site]:
    """The layers that have this width in the trial; none where anything else has changed as well."""
    if trial is None or trial.keys() != dense.keys():
        return []
    changed = {name for name in dense if dense[name] != trial[name]}
    changed_sites = [site for site in layers if site.axes[-1].tensor in changed]
    has_width = all(trial[site.axes[-1].tensor][site.axes[-1].dim] == width for site in changed_sites)
    return (
        changed_sites if has_width and changed <= {axis.tensor for site in changed_sites for axis in site.axes} else []
    )


def _candidates(model: PreTrainedModel, settings: Settings, widths: Collection[int]) -> Iterator[str]:
    """Numbers of the config that equal such a width, then those that are None (GPT-2's `n_inner`)."""
    numbers = list(entries(dense_config_class(model).from_dict(dict(settings)).to_dict()))
    yield from (name for name, value in numbers if type(value) is int and value in widths)
    yield from (name for name, value in numbers if value is None)


def _shapes(model: PreTrainedModel, settings: Settings, numbers: Numbers) -> Shapes | None:
    """The shapes of the state dict of the plain class with these numbers; None where it cannot be built."""
    try:
        with torch.device("meta"), quiet():
            model_with_numbers = dense_class(model)(
                dense_config_class(model).from_dict(with_numbers(settings, numbers))
            )
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ArithmeticError, StrictDataclassError):
        return None  # some sizes exclude one another, some entries are no sizes
    return {name: tuple(tensor.shape) for name, tensor in model_with_numbers.state_dict().items()}
