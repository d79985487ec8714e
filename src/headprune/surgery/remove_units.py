"""Removes units from the weights in place: slices, verifies against gates, and undoes the removal where they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune.errors import EquivalenceError, GateError, UnsupportedModelError
from headprune.hooks.gates import InstalledGates, gate_sites
from headprune.hooks.logit_blocks import comparable_outputs
from headprune.hooks.offload import input_device, is_dispatched
from headprune.hooks.outputs import largest_difference
from headprune.surgery.check_removable import check_removable
from headprune.units import Member, Site, all_sites, as_members, survey, widest
from headprune.units.quirks import QUIRKS
from headprune.units.slicing.removal import remaining, slice_weights
from headprune.units.slicing.undo import Undo


def remove_units(
    model: PreTrainedModel,
    members: Iterable[tuple[int, int]],
    *,
    sites: Sequence[Site] | None = None,
    verify: Mapping[str, Any] | None = None,
    afterwards: Callable[[], None] | None = None,
) -> None:
    """Remove these members, whole units in original ids, from the weights.

    With `verify=batch` the outputs on that batch are compared with those of the gated model. If they differ, or
    `afterwards`, which runs after the removal, raises, the model is restored. A caller that has resolved the `sites` of
    the model, and chosen among their members, passes both; otherwise the members are checked here.
    """
    if sites is None:
        chosen = as_members(members)
        sites = sites_with(model, chosen)
        check_removable(sites, chosen)
    else:
        chosen = [Member(*member) for member in members]
    if not chosen:
        return
    refuse_gates(model)
    expected = _gated_outputs(model, sites, chosen, verify) if verify is not None else None
    _refuse_wrapped(model, sites, remaining(sites, chosen))
    undo = Undo(model)
    try:
        slice_weights(model, sites, chosen)
        if expected is not None and verify is not None:
            difference, tolerance = largest_difference(expected, _pruned_outputs(model, verify))
            if not difference <= tolerance:
                raise EquivalenceError(difference, tolerance)
        if afterwards is not None:
            afterwards()
    except BaseException:
        undo()
        raise


def _pruned_outputs(model: nn.Module, batch: Mapping[str, Any]) -> list[torch.Tensor]:
    try:
        return comparable_outputs(model, batch)
    except Exception as error:  # whatever forward code raises on shapes that it does not expect
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        name = type(model).__name__
        raise UnsupportedModelError(f"{name} does not run with these units removed ({reason}).") from error


def refuse_gates(model: nn.Module) -> None:
    """Installed gates fit the units that the model had then."""
    if any(isinstance(module, InstalledGates) for module in model.modules()):
        raise GateError("This model has learned gates; end them with gates.remove() or gates.detach() first.")


def sites_with(model: nn.Module, members: Sequence[Member]) -> Sequence[Site]:
    """The sites of the model, with its feed-forward layers where some of the members are beyond attention."""
    attention = survey(model).sites
    in_attention = attention and all(member.site < len(attention) for member in members)
    return attention if in_attention else all_sites(model)


def _refuse_wrapped(model: nn.Module, sites: Sequence[Site], kept: Mapping[int, Sequence[int]]) -> None:
    for index, ids in kept.items():
        site = sites[index]
        module = model.get_submodule(site.path)
        quirk = site.needs.quirk
        replaced = quirk is not None and QUIRKS[quirk][0 if ids else 1] is not None
        if "forward" in module.__dict__ and replaced and not is_dispatched(module):
            raise UnsupportedModelError(
                f"The forward of {site.path} is wrapped by something other than accelerate; remove the wrapper first."
            )


def _gated_outputs(
    model: PreTrainedModel, sites: Sequence[Site], members: Sequence[Member], batch: Mapping[str, Any]
) -> list[torch.Tensor]:
    gates = torch.ones(len(sites), widest(sites), device=input_device(model))
    rows, columns = torch.tensor(members).T.to(gates.device)  # tens of thousands of neurons at once
    gates[rows, columns] = 0.0
    with gate_sites(model, sites, gates):
        return comparable_outputs(model, batch)
