"""The end of gates: what is closed leaves the weights, and what is open goes into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headprune.batches import rows_of
from headprune.errors import EquivalenceError, GateError
from headprune.hooks.outputs import evaluating, largest_difference, run
from headprune.surgery.remove_units import remove_units
from headprune.units import Member, Site
from headprune.units.cutting.undo import Undo
from headprune.units.linear import is_transposed

if TYPE_CHECKING:
    from headprune.gates.learned import LearnedGates


def close(gates: LearnedGates, verify: Mapping[str, Any] | None) -> Any:
    """The model of these gates without them; see `LearnedGates.remove`."""
    (given,) = gates._given
    model = gates.model
    if not gates.attached:
        raise GateError("These gates are not on their model any more, so there is nothing to remove.")
    if verify is None and gates.seen is not None:
        tensors = {name: value for name, value in gates.seen.items() if isinstance(value, torch.Tensor)}
        verify = rows_of(tensors, slice(0, 2)) if tensors else None
    gates.ended = True
    expected = None if verify is None else run(model, verify)
    with torch.no_grad(), evaluating(model):
        gates._now = None
        factors = {place.site.index: gates(place.site) for place in gates.places}
    closed = gates.closed()
    gates.detach()
    if given is not model:
        model = given.merge_and_unload()
    undo = Undo(model)

    def finish() -> None:
        for site in gates.sites:
            _fold(model, site, factors[site.index], closed)
        if expected is not None and verify is not None:
            difference, tolerance = largest_difference(expected, run(model, verify))
            if not difference <= tolerance:
                raise EquivalenceError(difference, tolerance)

    try:
        if closed:
            remove_units(model, closed, verify=verify, afterwards=finish)
        else:
            finish()
    except BaseException:
        undo()
        gates.ended = False
        if given is model:  # a merged adapter cannot be taken apart again
            gates.attach()
        raise
    return model


def _fold(model: nn.Module, site: Site, factors: torch.Tensor, closed: list[Member]) -> None:
    """Multiply the columns of the members that stay by what their gates gave."""
    gone = {member.index for member in closed if member.site == site.index}
    staying = [member for member in site.kept if member not in gone]
    own = factors[staying]
    if not staying or bool((own == 1).all()):
        return
    module: Any = model.get_submodule(site.o)
    places = {column: place for place, column in enumerate(sorted(site.columns(_positions(site, staying))))}
    scale = torch.empty(len(places), device=own.device, dtype=own.dtype)
    for number, member in enumerate(staying):
        for column in site.columns([site.position(member)]):
            scale[places[column]] = own[number]
    scale = scale.to(module.weight)
    folded = module.weight.detach() * (scale[:, None] if is_transposed(module) else scale)
    # A new parameter, as in surgery, so that undoing is putting the old one back.
    module.weight = nn.Parameter(folded, requires_grad=module.weight.requires_grad)


def _positions(site: Site, members: list[int]) -> list[int]:
    return [site.position(member) for member in members]
