"""The layout of a pruned model, carried by its config.json, so that loading needs neither the table of families nor an
experiment. Beside what `quirks.restructure` reads, each entry has

    site             the number of the site among those of its kind
    original, left   how many members it had, and how many it has
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headprune.errors import CheckpointError
from headprune.store.shipped import fitting
from headprune.units import Kind, Site
from headprune.units.cutting.plan import plan
from headprune.units.cutting.record import NAMES, write_record
from headprune.units.dense import dense_class
from headprune.units.quirks import restructure

Removed = Mapping[Kind, Mapping[int, Sequence[int]]]  # by kind, and by the number of a site among those of its kind
COPY = "copy the checkpoint again"


def layout_of(model: PreTrainedModel, sites: Sequence[Site]) -> dict[str, Any]:
    """The entries of every site that has lost something, and the name that their paths give to the model without its
    head; empty where nothing was removed."""
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


def read_layout(config: Any, removed: Removed, place: str | Path) -> dict[str, Any]:
    """The layout in a config, which has to belong to its record of what was removed; empty where there is none, as in
    checkpoints of earlier versions."""
    record = getattr(config, "headprune", None) or {}
    if "layout" not in record:
        return {}
    try:
        entries = {(entry["kind"], entry["site"]): entry for entry in record["layout"]}
        given = [entry.get(name, {}) for entry in entries.values() for name in ("attributes", "config")]
        if len(entries) < len(record["layout"]):
            raise ValueError("it names a site twice")
        if not all(type(number) is int for numbers in given for number in numbers.values()):
            raise ValueError("it gives a module something that is no number")
        for kind, name in NAMES.items():
            own = {site: entry for (known, site), entry in entries.items() if known == kind}
            for site in {**own, **removed.get(kind, {})}:
                ids = removed.get(kind, {}).get(site, ())
                if site not in own or not _belongs(own[site], ids):
                    raise ValueError(f"it does not belong to the {len(ids)} of site {site} in {name}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"The layout in the config of {place} is damaged: {_said(error)}; {COPY}.") from None
    return dict(record)


def _belongs(entry: Mapping[str, Any], removed: Sequence[int]) -> bool:
    """Whether these are the members that are gone from this site."""
    kept = set(entry.get("kept", ()))
    there = all(0 <= member < entry["original"] and member not in kept for member in removed)
    return there and len(removed) == entry["original"] - entry["left"]


def apply_layout(model: PreTrainedModel, layout: Mapping[str, Any], removed: Removed, place: str | Path) -> None:
    """Give a freshly built dense model the shapes of the pruned one, for a loader to fill with weights."""
    try:
        restructure(model, fitting(model, layout))
    except Exception as error:  # whatever a module says to a layout that somebody changed
        raise CheckpointError(
            f"The layout in the config of {place} does not fit {type(model).__name__}: {_said(error)}; {COPY}."
        ) from None
    for kind, own in removed.items():
        write_record(model, kind, own)


def _said(error: Exception) -> str:
    words = " ".join(str(error).split())[:300]
    return words if isinstance(error, ValueError) else f"{type(error).__name__}: {words}"
