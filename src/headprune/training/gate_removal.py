"""The end of learned gates: closed members are removed, values of open gates are multiplied into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headprune.errors import EquivalenceError, GateError
from headprune.hooks.outputs import evaluating, largest_difference, run
from headprune.surgery.remove_units import remove_units
from headprune.tasks import task_of
from headprune.units import Member, Site
from headprune.units.linear import is_transposed
from headprune.units.slicing.undo import Undo

if TYPE_CHECKING:
    from headprune.training.learned_gates import LearnedGates


def remove_gates(gates: LearnedGates, verify: Mapping[str, Any] | None) -> Any:
    """See `LearnedGates.remove`."""
    (outer,) = gates._outer
    model = gates.model
    if not gates.attached:
        raise GateError("These gates are not on their model any more, so there is nothing to remove.")
    gates.reach.check_removal()
    if verify is None and gates.last_inputs is not None:
        tensors = {name: value for name, value in gates.last_inputs.items() if isinstance(value, torch.Tensor)}
        verify = task_of(model).select(tensors, slice(0, 2)) if tensors else None
    gates.ended = True
    expected = None if verify is None else run(model, verify)
    with torch.no_grad(), evaluating(model):
        gates._now = None
        factors = {site_gates.site.index: gates(site_gates.site) for site_gates in gates.layout}
    closed = gates.closed()
    gates.detach()
    if outer is not model:
        model = outer.merge_and_unload()
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
        if outer is model:  # a merged adapter cannot be separated again
            gates.attach()
        raise
    return model


def _fold(model: nn.Module, site: Site, factors: torch.Tensor, closed: list[Member]) -> None:
    """Multiply the columns of the remaining members in the output projection by the values of their gates."""
    removed = {member.index for member in closed if member.site == site.index}
    remaining = [member for member in site.kept if member not in removed]
    values = factors[remaining]
    if not remaining or bool((values == 1).all()):
        return
    module: Any = model.get_submodule(site.o)
    columns = sorted(site.columns([site.position(member) for member in remaining]))
    new_index = {column: index for index, column in enumerate(columns)}
    scale = torch.empty(len(columns), device=values.device, dtype=values.dtype)
    for number, member in enumerate(remaining):
        for column in site.columns([site.position(member)]):
            scale[new_index[column]] = values[number]
    scale = scale.to(module.weight)
    folded = module.weight.detach() * (scale[:, None] if is_transposed(module) else scale)
    # A new parameter, as in surgery, so that undo can put the old one back.
    module.weight = nn.Parameter(folded, requires_grad=module.weight.requires_grad)
