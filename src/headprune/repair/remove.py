"""`remove`: units out of the weights, and what stays takes over what it can."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from headprune.errors import DataError, HeadSelectionError, warn_renamed
from headprune.repair.apply import apply_repairs, check_compensation, plan_repairs
from headprune.repair.regression import BUDGETS_ONLY, Compensation, Repair
from headprune.signals.moments import Moments
from headprune.surgery.check import check_removable
from headprune.surgery.cut import cut
from headprune.tasks import Task, task_of
from headprune.units import Member, Site, all_sites, as_members, resolve
from headprune.units.linear import refuse_quantized


def remove(
    model: PreTrainedModel,
    heads: Iterable[tuple[int, int]] = (),
    *,
    neurons: Iterable[tuple[int, int]] = (),
    verify: Mapping[str, Any] | None = None,
    repair: Compensation = "none",
    batches: Iterable[Mapping[str, Any]] | None = None,
    compensate: Compensation | None = None,
) -> PreTrainedModel:
    """Take heads, neurons or both out of the weights, in place, and return the model.

    `heads` are (site, head) pairs in original ids, `neurons` (site, neuron) pairs; sites are numbered as `inspect`
    shows them, feed-forward layers after attention. With `verify=batch` the outputs on that batch are compared with
    those of the gated model; if they differ, the removal is undone and `EquivalenceError` tells by how much.
    With `repair="lstsq"` the heads that stay take over what they can of what these heads did on the calibration
    `batches`; with "mean" the bias of the output projection takes over its mean; `compensate` is what
    this was called.
    Parameters are replaced by smaller ones, so make an optimizer after this and not before.
    """
    if compensate is not None:
        warn_renamed("compensate", "repair")
        repair = compensate
    refuse_quantized(model, "pruned")
    chosen_heads, chosen_neurons = as_members(heads), as_members(neurons, "neuron")
    sites = _checked_sites(model, chosen_heads, chosen_neurons)
    if check_compensation(repair) in BUDGETS_ONLY:
        raise DataError(f"repair={repair!r} goes with a budget of prune; use 'lstsq', 'mean' or 'none' here.")
    if repair != "none" and batches is None:
        raise DataError(f"repair={repair!r} needs calibration data; give it as batches=[...].")
    chosen = [*chosen_heads, *chosen_neurons]
    remove_and_repair(model, sites, chosen, verify=verify, repair=repair, batches=batches or ())
    return model


def _checked_sites(model: PreTrainedModel, heads: list[Member], neurons: list[Member]) -> Sequence[Site]:
    """The sites of the model, where these can all be removed; what is said to be a head may be no neuron, nor the other
    way round."""
    sites: Sequence[Site] = all_sites(model) if neurons else resolve(model)
    check_removable([site for site in sites if site.kind == "heads"], heads)
    for member in neurons:
        if not 0 <= member.site < len(sites) or sites[member.site].kind != "neurons":
            places = [site.index for site in sites if site.kind == "neurons"]
            there = f"sites {places[0]} to {places[-1]}" if places else "no site"
            raise HeadSelectionError(
                f"Neuron {tuple(member)} does not exist: {there} of this model have neurons that can be removed."
            )
    check_removable(sites, neurons)
    return sites


def remove_and_repair(
    model: PreTrainedModel,
    sites: Sequence[Site],
    members: Sequence[Member],
    *,
    verify: Mapping[str, Any] | None = None,
    repair: Compensation = "none",
    batches: Iterable[Mapping[str, Any]] = (),
    moments: Mapping[int, Moments] | None = None,
    task: Task | None = None,
) -> list[Repair]:
    """`remove`, for callers that have the sites of the model and chose among their members, want to know what the
    compensation did, or know the `moments` that it rests on."""
    if not members:
        return []
    repairs = plan_repairs(model, sites, members, repair, batches, task or task_of(model), moments)
    cut(model, members, sites=sites, verify=verify, afterwards=lambda: apply_repairs(model, sites, repairs))
    return repairs
