"""Removes units from the weights of a model, in place: slices first, then what its forward code needs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from headprune.hooks.offload import load_for_good, rewrap_forward
from headprune.units.members import Member, by_site
from headprune.units.quirks import restructure
from headprune.units.slicing.plan import plan
from headprune.units.slicing.record import write_record
from headprune.units.slicing.slices import Slices
from headprune.units.spec import Site


def remaining(sites: Sequence[Site], members: Sequence[Member]) -> dict[int, list[int]]:
    """site -> ids that are left, for every site that loses some of these members."""
    leaving = {index: set(ids) for index, ids in by_site(members).items()}
    return {index: [member for member in sites[index].kept if member not in ids] for index, ids in leaving.items()}


def slice_weights(
    model: nn.Module,
    sites: Sequence[Site],
    members: Sequence[Member],
) -> None:
    """Remove these members, whole units, and record them with those removed before."""
    kept = remaining(sites, members)
    steps = plan(model, sites, kept)
    slices = Slices(model)
    for index, ids in kept.items():
        _select(slices, sites[index], ids)
    slices.apply()
    modules = [(model.get_submodule(sites[index].path), model.get_submodule(sites[index].o)) for index in kept]
    classes = [type(module) for module, _ in modules]
    for (_, output), ids in zip(modules, kept.values(), strict=True):
        if not ids:  # replaced by its bias, in another module
            load_for_good(output)
    restructure(model, steps)
    for (module, _), before in zip(modules, classes, strict=True):
        if type(module) is not before:
            rewrap_forward(module)
    leaving = by_site(members)
    for kind in dict.fromkeys(sites[index].kind for index in leaving):
        sites_of_kind = [site for site in sites if site.kind == kind]
        removed = {number: [*site.removed, *leaving.get(site.index, ())] for number, site in enumerate(sites_of_kind)}
        write_record(model, kind, {number: ids for number, ids in removed.items() if ids})


def _select(slices: Slices, site: Site, kept: Sequence[int]) -> None:
    units = [site.position(member) // site.group for member in kept[:: site.group]]
    for axis, units_left in site.axes_left(units):
        slices.add(axis.tensor, axis.dim, axis.left(units_left))
