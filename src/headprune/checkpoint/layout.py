"""The layout of a pruned model, stored in its config.json, so that loading needs neither the table of families nor
discovery. Beside what `quirks.restructure` reads, each entry has

    site             the number of the site among those of its kind
    original, left   how many members it had, and how many it has
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headprune.checkpoint.portable_code import fit_layout
from headprune.errors import CheckpointError
from headprune.units import Kind, Site
from headprune.units.cutting.plan import plan
from headprune.units.cutting.record import NAMES, write_record
from headprune.units.dense_model import dense_class
from headprune.units.quirks import restructure

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
