"""A freshly built dense model in the shapes of a pruned one, for checkpoints of earlier versions, which carry no
layout."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from headprune.errors import HeadSelectionError, UnsupportedModelError
from headprune.surgery.check import check_removable
from headprune.units import Kind, Member, sites_of
from headprune.units.cutting.plan import plan
from headprune.units.cutting.record import write_record
from headprune.units.cutting.removal import remaining
from headprune.units.dense import quiet
from headprune.units.quirks import restructure


def learn_layout(kind: type[PreTrainedModel], config: PreTrainedConfig, kinds: Collection[Kind]) -> None:
    """Have the layout of a class at hand, if it has to be discovered: a loader builds models in a state of its own,
    where nothing else can be built."""
    with suppress(UnsupportedModelError), quiet():  # said again, where the layout is asked for
        with torch.device("meta"):
            model = kind(copy.deepcopy(config))
        sites_of(model, kinds)


def shrink(model: PreTrainedModel, removed: Mapping[Kind, Mapping[int, Sequence[int]]]) -> None:
    """Give a freshly built dense model the shapes of a pruned one, for a loader to fill with weights; `removed` is by
    kind and by the number of a site among those of its kind."""
    sites = sites_of(model, [kind for kind, own in removed.items() if own])
    chosen: list[Member] = []
    for kind, own in removed.items():
        numbered = [site for site in sites if site.kind == kind]
        for number, ids in own.items():
            if not 0 <= number < len(numbered):
                raise HeadSelectionError(
                    f"{kind.capitalize()[:-1]} {(number, *ids[:1])} does not exist: the model has {len(numbered)} "
                    f"sites of {kind}, numbered from 0."
                )
            chosen += [Member(numbered[number].index, member) for member in ids]
    check_removable(sites, chosen)
    restructure(model, plan(model, sites, remaining(sites, chosen)))
    for kind, own in removed.items():
        if own:
            write_record(model, kind, own)
