"""The proof that removal is exact: on a small random model, heads removed against heads whose columns are zero."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import Cache

from headprune.units.cutting.removal import take_out
from headprune.units.cutting.undo import Undo
from headprune.units.measured.sites import DenseSite, site_of
from headprune.units.measured.trial import close, silent_columns
from headprune.units.members import Member
from headprune.units.small import Run
from headprune.units.spec import AttentionSite


def prove(
    model: nn.Module, runs: Sequence[Run], dense: Sequence[DenseSite]
) -> tuple[list[DenseSite], list[tuple[str, str]]]:
    """The sites that removal is exact for, alone and together, and the others with reasons."""
    if not dense or not _fail_together(model, runs, dense):
        return list(dense), []
    proven, refused = [], []
    for number, own in enumerate(dense):
        found = _by_itself(model, runs, dense, number)
        if isinstance(found, str):
            refused.append((own.path, found))
        else:
            proven.append(found)
    together = _fail_together(model, runs, proven) if proven else ""
    if together:
        return [], [*refused, *((site.path, f"together with the other sites, {together}") for site in proven)]
    return proven, refused


def _fail_together(model: nn.Module, runs: Sequence[Run], dense: Sequence[DenseSite]) -> str:
    sites = _sites(dense)
    return fails(model, runs, sites, _everywhere(sites)) if sites else ""


def _by_itself(model: nn.Module, runs: Sequence[Run], dense: Sequence[DenseSite], number: int) -> DenseSite | str:
    """The site with the way to run it without heads that works in its model, or why none of its heads can go."""
    own = dense[number]
    some, everything = _alone(_sites(dense)[number])
    reason = fails(model, runs, _sites(dense), some) if some else ""
    if reason:
        return reason
    ways: tuple[Any, ...] = {"bypass": ("bypass", "silent", ""), "silent": ("silent", "")}.get(own.recipe.empty, ("",))
    for way in ways:
        changed = replace(own, recipe=replace(own.recipe, empty=way))
        others = [*dense[:number], changed, *dense[number + 1 :]]
        if not way:
            break
        reason = fails(model, runs, _sites(others), everything)
        if not reason:
            return changed
    return changed if some else reason or "it has one head, which cannot be removed"


def _sites(dense: Sequence[DenseSite]) -> list[AttentionSite]:
    return [site_of(site, index, [], stack="encoder", attention="self") for index, site in enumerate(dense)]


def _everywhere(sites: Sequence[AttentionSite]) -> list[Member]:
    """Half the units of every site, other ones at every other site, and one site as a whole where that is possible."""
    members = []
    emptied = next((site.index for site in sites if site.recipe is None or site.recipe.empty), -1)
    for site in sites:
        units = site.units()
        chosen = units if site.index == emptied else units[site.index % 2 :: 2][: max(1, len(units) - 1)]
        if len(units) > 1 or site.index == emptied:
            members += [member for unit in chosen for member in unit]
    return members


def _alone(site: AttentionSite) -> tuple[list[Member], list[Member]]:
    """Half of its units, where it has more than one, and all of them."""
    units = site.units()
    half = units[::2] if len(units) > 1 else []
    return [m for unit in half for m in unit], [m for unit in units for m in unit]


def fails(model: nn.Module, runs: Sequence[Run], sites: Sequence[AttentionSite], members: Sequence[Member]) -> str:
    """Empty where outputs and gradients with these members removed are those with them silenced; else what differs."""
    chosen = [(site, [member for member in members if member.site == site.index]) for site in sites]
    with silent_columns(model, [(site, own) for site, own in chosen if own]):
        wanted = [outcome(model, run) for run in runs]
    undo = Undo(model)
    try:
        take_out(model, sites, members, {})
        for run, expected in zip(runs, wanted, strict=True):
            given = outcome(model, run)
            if len(given) != len(expected) or not all(close(a, b) for a, b in zip(expected, given, strict=True)):
                return "removing heads did not give what silencing them gives"
    except Exception as error:
        return f"the model fails with fewer heads ({type(error).__name__}: {' '.join(str(error).split())[:120]})"
    finally:
        undo()
    return ""


def outcome(model: nn.Module, run: Run) -> list[torch.Tensor]:
    """All floating-point tensors that a run gives, caches and attention maps left out."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        result = model.get_submodule(run.path)(**copy.deepcopy(run.inputs))
    return list(_tensors(result))


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if "attentions" not in str(name) and name != "past_key_values":
                yield from _tensors(item)
    elif isinstance(value, (tuple, list)) and not isinstance(value, Cache):
        for item in value:
            yield from _tensors(item)
