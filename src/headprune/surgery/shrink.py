"""A freshly built dense model in the shapes of a pruned one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from transformers import PreTrainedConfig, PreTrainedModel

from headprune.surgery.check import check_removable
from headprune.units import Head, resolve
from headprune.units.cutting.plan import plan, write_record
from headprune.units.families import family_of
from headprune.units.measured.verdict import NoTwinError, verdict_for
from headprune.units.quirks import restructure


def learn_layout(kind: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Measure the layout of a class now, if it has to be: a loader builds models in a state of its own, where nothing
    else can be built."""
    if family_of(config.model_type) is None:
        with suppress(NoTwinError):  # said again, in a sentence, where the layout is asked for
            verdict_for(kind, config)


def shrink(model: PreTrainedModel, removed: Mapping[int, Sequence[int]]) -> None:
    """Give a freshly built dense model the shapes of a pruned one, for a loader to fill with weights."""
    sites = resolve(model)
    check_removable(sites, [Head(site, head) for site, ids in removed.items() for head in ids])
    kept = {index: [h for h in sites[index].kept if h not in set(ids)] for index, ids in removed.items() if ids}
    restructure(model, plan(model, sites, kept))
    write_record(model, removed)
