"""Gives a newly built dense model the shapes of a pruned one, for checkpoints of earlier versions, which have no
layout."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from headprune.errors import HeadSelectionError, UnsupportedModelError
from headprune.surgery.check_removable import check_removable
from headprune.units import Kind, Member, sites_of
from headprune.units.dense_model import quiet
from headprune.units.quirks import restructure
from headprune.units.slicing.plan import plan
from headprune.units.slicing.record import write_record
from headprune.units.slicing.removal import remaining


def learn_layout(kind: type[PreTrainedModel], config: PreTrainedConfig, kinds: Collection[Kind]) -> None:
    """Discover and cache the layout of a class, if that is needed: while a loader builds a model, no other can be
    built."""
    with suppress(UnsupportedModelError), quiet():  # raised again when the layout is needed
        with torch.device("meta"):
            model = kind(copy.deepcopy(config))
        sites_of(model, kinds)


def shrink(model: PreTrainedModel, removed: Mapping[Kind, Mapping[int, Sequence[int]]]) -> None:
    """Give a newly built dense model the shapes of a pruned one, for a loader to fill with weights; `removed` is by
    kind and by the number of a site among those of its kind."""
    sites = sites_of(model, [kind for kind, ids_by_site in removed.items() if ids_by_site])
    chosen: list[Member] = []
    for kind, ids_by_site in removed.items():
        numbered = [site for site in sites if site.kind == kind]
        for number, ids in ids_by_site.items():
            if not 0 <= number < len(numbered):
                raise HeadSelectionError(
                    f"{kind.capitalize()[:-1]} {(number, *ids[:1])} does not exist: the model has {len(numbered)} "
                    f"sites of {kind}, numbered from 0."
                )
            chosen += [Member(numbered[number].index, member) for member in ids]
    check_removable(sites, chosen)
    restructure(model, plan(model, sites, remaining(sites, chosen)))
    for kind, ids_by_site in removed.items():
        if ids_by_site:
            write_record(model, kind, ids_by_site)
