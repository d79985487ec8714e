"""The layout of a pruned model, stored in its config.json, so that loading needs neither the table of families nor
discovery. Beside what `quirks.restructure` reads, each entry has

    site             the number of the site among those of its kind
    original, left   how many members it had, and how many it has
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.checkpoint.portable_code import fit_layout
from headprune.errors import CheckpointError
from headprune.hooks.module_paths import submodule
from headprune.units import Kind, Site
from headprune.units.dense_model import dense_class, dense_on_meta
from headprune.units.linear import refuse_computed
from headprune.units.quirks import restructure
from headprune.units.slicing.plan import plan
from headprune.units.slicing.record import NAMES, write_record

Removed = Mapping[Kind, Mapping[int, Sequence[int]]]  # by kind, and by the number of a site among those of its kind
COPY = "copy the checkpoint again"


def layout_of(model: PreTrainedModel, sites: Sequence[Site]) -> dict[str, Any]:
    """The entries of every pruned site, and the prefix of their paths for the base model; empty where nothing was
    removed."""
    numbers = {site.index: sum(other.kind == site.kind for other in sites[: site.index]) for site in sites}
    pruned = [site for site in sites if site.size < site.original]
    if not pruned:
        return {}
    entries = plan(model, sites, {site.index: site.kept for site in pruned})
    for site, entry in zip(pruned, entries, strict=True):
        entry.update(kind=site.kind, site=numbers[site.index], original=site.original, left=site.size)
    prefix = dense_class(model).base_model_prefix
    return {
        "layout": entries,
        "prefix": f"{prefix}." if isinstance(getattr(model, prefix or "-", None), nn.Module) else "",
    }


def refuse_unloadable(model: PreTrainedModel, layout: Mapping[str, Any]) -> None:
    """Raise unless the tensors of a model are those that `load` builds from its config and this layout."""
    dense = dense_on_meta(dense_class(model), model.config)
    if dense is None:  # its class needs other arguments, with which it may be loaded
        return
    built = copy.deepcopy(dense)
    restructure(built, copy.deepcopy(layout.get("layout", [])))
    expected, present = _shapes(built), _shapes(model)
    different = [name for name in {**expected, **present} if expected.get(name) != present.get(name)]
    if not different:
        return
    name, kind = different[0], type(model).__name__
    path, _, tensor = name.rpartition(".")
    if (owner := submodule(model, path)) is not None:
        refuse_computed(owner, path, tensor)
    what = (
        f"the model has no {name}"
        if name not in present
        else f"{name} is not a part of it"
        if name not in expected
        else f"{name} has the shape {present[name]} and not {expected[name]}"
    )
    is_adapted = any(hasattr(module, "base_layer") for module in model.modules())
    fix = "merge the adapter first" if is_adapted else "make its config and its modules match"
    raise CheckpointError(
        f"A checkpoint of this model could not be loaded, as it is not the {kind} of its config: {what}; {fix}."
    )


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)
    }


def read_layout(config: Any, removed: Removed, folder: str | Path) -> dict[str, Any]:
    """The layout in a config, checked against its record of removed units; empty where there is none, as in checkpoints
    of earlier versions."""
    record = getattr(config, "headprune", None) or {}
    if "layout" not in record:
        return {}
    try:
        entries = {(entry["kind"], entry["site"]): entry for entry in record["layout"]}
        number_tables = [entry.get(name, {}) for entry in entries.values() for name in ("attributes", "config")]
        if len(entries) < len(record["layout"]):
            raise ValueError("it names a site twice")
        if not all(type(number) is int for numbers in number_tables for number in numbers.values()):
            raise ValueError("an attribute of a module is no integer")
        for kind, name in NAMES.items():
            layout_of_kind = {site: entry for (kind_of_entry, site), entry in entries.items() if kind_of_entry == kind}
            for site in {**layout_of_kind, **removed.get(kind, {})}:
                ids = removed.get(kind, {}).get(site, ())
                if site not in layout_of_kind or not _matches_record(layout_of_kind[site], ids):
                    raise ValueError(f"it does not match the {len(ids)} of site {site} in {name}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"The layout in the config of {folder} is damaged: {_error_text(error)}; {COPY}."
        ) from None
    return dict(record)


def _matches_record(entry: Mapping[str, Any], removed: Sequence[int]) -> bool:
    """Whether these members, and no others, are missing in this entry."""
    kept = set(entry.get("kept", ()))
    removed_only = all(0 <= member < entry["original"] and member not in kept for member in removed)
    return removed_only and len(removed) == entry["original"] - entry["left"]


def apply_layout(model: PreTrainedModel, layout: Mapping[str, Any], removed: Removed, folder: str | Path) -> None:
    """Give a newly built dense model the shapes of the pruned one, for a loader to fill with weights."""
    try:
        restructure(model, fit_layout(model, layout))
    except Exception as error:  # whatever a module raises on a manipulated layout
        raise CheckpointError(
            f"The layout in the config of {folder} does not fit {type(model).__name__}: {_error_text(error)}; {COPY}."
        ) from None
    for kind, ids_by_site in removed.items():
        write_record(model, kind, ids_by_site)


def _error_text(error: Exception) -> str:
    words = " ".join(str(error).split())[:300]
    return words if isinstance(error, ValueError) else f"{type(error).__name__}: {words}"
