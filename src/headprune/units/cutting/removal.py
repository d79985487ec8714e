"""Taking units out of the weights of a model, in place: slices first, then what its forward code needs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from headprune.hooks.offload import bring_in, rewrap
from headprune.units.cutting.plan import plan
from headprune.units.cutting.record import write_record
from headprune.units.cutting.slices import Slices
from headprune.units.members import Member, by_site
from headprune.units.quirks import restructure
from headprune.units.spec import Site


def remaining(sites: Sequence[Site], members: Sequence[Member]) -> dict[int, list[int]]:
    """site -> ids that are left, for every site that loses some of these members."""
    going = {index: set(ids) for index, ids in by_site(members).items()}
    return {index: [member for member in sites[index].kept if member not in ids] for index, ids in going.items()}


def slice_weights(
    model: nn.Module,
    sites: Sequence[Site],
    members: Sequence[Member],
) -> None:
    """Remove these members, whole units, and note them beside those that went before."""
    kept = remaining(sites, members)
    steps = plan(model, sites, kept)
    slices = Slices(model)
    for index, ids in kept.items():
        _select(slices, sites[index], ids)
    slices.apply()
    sited = [(model.get_submodule(sites[index].path), model.get_submodule(sites[index].o)) for index in kept]
    classes = [type(module) for module, _ in sited]
    for (_, output), ids in zip(sited, kept.values(), strict=True):
        if not ids:  # of which a bias is left, in another module
            bring_in(output)
    restructure(model, steps)
    for (module, _), before in zip(sited, classes, strict=True):
        if type(module) is not before:
            rewrap(module)
    going = by_site(members)
    for kind in dict.fromkeys(sites[index].kind for index in going):
        own = [site for site in sites if site.kind == kind]
        gone = {number: [*site.gone, *going.get(site.index, ())] for number, site in enumerate(own)}
        write_record(model, kind, {number: ids for number, ids in gone.items() if ids})


def _select(slices: Slices, site: Site, kept: Sequence[int]) -> None:
    units = [site.position(member) // site.group for member in kept[:: site.group]]
    for axis, staying in site.axes_left(units):
        slices.add(axis.tensor, axis.dim, axis.left(staying))
