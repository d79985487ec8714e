"""Repairing a pruned model front to back: every output map is fitted to what reaches it through everything pruned and
repaired before it, towards what the dense model gives there, or towards what the site itself gave."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.batches import rows_of
from headprune.hooks.logits import few_logits
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.hooks.watch import watched
from headprune.layerwise.activation_store import ActivationStore
from headprune.layerwise.check import is_walkable
from headprune.layerwise.site_passes import SitePasses
from headprune.layerwise.site_tokens import SiteInputs
from headprune.repair.apply import apply_repair, output_map, owners_of, plan_repair
from headprune.repair.regression import DENSE_RIDGES, SITE_RIDGES, Repair, RepairKind, Sums, fit, sums_of_all
from headprune.signals.moments import FOLDS, Gathering
from headprune.surgery.remove_units import remove_units
from headprune.tasks import Task
from headprune.units import Member, Site, by_site

log = logging.getLogger(__name__)

# Of how far the stream is off already, the part that a site is to make good: ours, and what the papers of others do.
CATCH_UP: dict[RepairKind, float] = {"dense": 0.75, "scale": 1.0}


@dataclass
class Target:
    """What one site is repaired towards, batch after batch."""

    outputs: ActivationStore  # [tokens x out]: what the dense model gives there
    streams: ActivationStore | None  # [tokens x out]: what it is added to there; None where that is not known
    weights: list[torch.Tensor] | None  # [tokens]
    routed: bool = False  # whether it is given some tokens alone, which others choose
    numbers: list[int] = field(default_factory=list)  # of the batches, in all the data


def repair_front_to_back(
    model: PreTrainedModel,
    sites: Sequence[Site],
    targets: Mapping[int, Target],
    inputs: SiteInputs,
    kind: RepairKind = "dense",
    *,
    ridges: tuple[float, ...] = DENSE_RIDGES,
    precision: torch.dtype = torch.float64,
) -> list[Repair]:
    """Repair these sites in the order of `targets`, what the dense model gives at each, batch after batch; the
    sums that this rests on are kept in this `precision`."""
    repairs = []
    if kind == "none":
        return []
    for index in targets:
        site = sites[index]
        output: Any = model.get_submodule(site.o)
        shared = any(owners_of(model, getattr(output, name, None)) > 1 for name in ("weight", "bias"))
        if shared or (not site.kept and output.bias is None):
            continue
        # Which tokens an expert is given depends on what was pruned before it, so there is nothing to compare with.
        routed = targets[index].routed
        catch_up = CATCH_UP[kind]
        sums = None if routed else _gathered(model, inputs, site, targets[index], catch_up, precision)
        repair = distributed.on_main(functools.partial(_planned, model, site, sums, kind, ridges, routed))
        apply_repair(model, site, repair)
        repairs.append(repair)
    return repairs


def _planned(
    model: PreTrainedModel,
    site: Site,
    sums: Sums | None,
    kind: RepairKind,
    ridges: tuple[float, ...],
    routed: bool,
) -> Repair:
    if sums is None or not torch.isfinite(sums.zz.diagonal(dim1=1, dim2=2)).all():
        why = "its tokens are chosen for it" if routed else "what it gives is not finite"
        log.warning("Site %d (%s) is left without compensation: %s.", site.index, site.path, why)
        return Repair(site.index, "none", None, None)
    weight, bias = output_map(model, site)
    units = torch.empty(weight.shape[1], dtype=torch.long)
    units[site.columns(range(site.size))] = torch.arange(weight.shape[1]) // (site.width * site.group)
    return fit(weight, bias, sums, kind, ridges=ridges, units=units, site=site.index)


def _gathered(
    model: PreTrainedModel, inputs: SiteInputs, site: Site, target: Target, catch_up: float, precision: torch.dtype
) -> Sums | None:
    """Sums over all batches, which several processes share."""
    sums: Sums | None = None
    weight, bias = output_map(model, site)
    streams = target.streams is not None and catch_up > 0
    with distributed.fail_together():
        for number, (tokens, wanted) in enumerate(zip(inputs.at(site, streams=streams), target.outputs, strict=True)):
            if not len(wanted):
                continue
            outputs = wanted
            if tokens.stream is not None and target.streams is not None:
                outputs = wanted + catch_up * (target.streams[number] - tokens.stream.cpu())
            if sums is None:
                sums = Sums.blank(tokens.columns.shape[1], outputs.shape[1], precision)
            weights = None if target.weights is None else target.weights[number]
            sums.add(tokens.columns, outputs, weight, bias, tokens.samples % FOLDS, weights)
    return sums_of_all(sums, precision)


def remove_front_to_back(
    model: PreTrainedModel,
    sites: Sequence[Site],
    members: Sequence[Member],
    batches: Sequence[Mapping[str, Any]],
    task: Task,
    kind: RepairKind = "lstsq",
    verify: Mapping[str, Any] | None = None,
) -> list[Repair]:
    """Remove these members in the order in which their sites run, as ZipLM and OSSCAR do: each output map (or, by the
    mean, its bias) is solved towards what it gave with them, on what reaches it through the sites before it. Nothing
    looks back at the dense model, so what one site could not make good is carried on."""
    going = by_site(members)
    repairs: list[Repair] = []
    passes = SitePasses(model, sites, batches, task, walkable=is_walkable(model, sites, batches, task))
    for index in running_order(model, [sites[index] for index in going], batches[0], task):
        gone = [Member(index, member) for member in going[index]]
        repairs.append(remove_from_site(model, sites[index], gone, passes, kind, verify=verify))
        verify = None  # all sites are cut alike
    return repairs


def remove_from_site(
    model: PreTrainedModel,
    site: Site,
    members: Sequence[Member],
    inputs: SiteInputs,
    kind: RepairKind = "lstsq",
    *,
    verify: Mapping[str, Any] | None = None,
    ridges: tuple[float, ...] = SITE_RIDGES,
    precision: torch.dtype = torch.float64,
) -> Repair:
    """Remove these members of one site, and repair it towards what it gave with them, on what it is given now."""
    gathering = Gathering(precision)
    with distributed.fail_together():
        for tokens in inputs.at(site):
            gathering.add(site.index, tokens.columns, tokens.samples)
    moments = gathering.moments().get(site.index)
    gone = [member.index for member in members]
    repair = distributed.on_main(lambda: plan_repair(model, site, gone, kind, moments, ridges))
    remove_units(model, members, verify=verify)
    apply_repair(model, site, repair)
    return repair


def running_order(model: PreTrainedModel, sites: Sequence[Site], batch: Mapping[str, Any], task: Task) -> list[int]:
    """Indices of sites in the order in which a forward pass comes to them, and last of those that it does not reach."""
    seen: dict[int, None] = {}
    sample = task.prepare(rows_of(batch, slice(0, 1)), input_device(model))
    with (
        torch.no_grad(),
        evaluating(model),
        watched(model, sites, output=lambda site, columns: seen.setdefault(site.index)),
    ):
        model(**few_logits(model, task.inputs(sample)))
    return [*seen, *(site.index for site in sites if site.index not in seen)]
