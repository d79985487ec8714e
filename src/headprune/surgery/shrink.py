"""A freshly built dense model in the shapes of a pruned one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from headprune.surgery.check import check_removable
from headprune.units import Head, resolve
from headprune.units.cutting.plan import plan, write_record
from headprune.units.quirks import restructure


def shrink(model: PreTrainedModel, removed: Mapping[int, Sequence[int]]) -> None:
    """Give a freshly built dense model the shapes of a pruned one, for a loader to fill with weights."""
    sites = resolve(model)
    check_removable(sites, [Head(site, head) for site, ids in removed.items() for head in ids])
    kept = {index: [h for h in sites[index].kept if h not in set(ids)] for index, ids in removed.items() if ids}
    restructure(model, plan(model, sites, kept))
    write_record(model, removed)
