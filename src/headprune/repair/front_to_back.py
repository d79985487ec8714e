"""Repair of a pruned model front to back: every output map is fitted on its inputs in the model that is pruned and
repaired up to there, towards the dense model's outputs, or towards the site's outputs before the removal."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.hooks.logit_blocks import few_logits
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.hooks.site_activations import site_callbacks
from headprune.layerwise.activation_store import ActivationStore
from headprune.layerwise.check_walkable import is_walkable
from headprune.layerwise.site_inputs import SiteInputs
from headprune.layerwise.site_passes import SitePasses
from headprune.progress import tracked
from headprune.repair.apply import apply_repair, count_uses, output_map, plan_repair
from headprune.repair.regression import DENSE_RIDGES, SITE_RIDGES, Repair, RepairKind, Sums, fit, sums_of_all
from headprune.signals.moments import FOLDS, Gathering
from headprune.surgery.remove_units import remove_units
from headprune.tasks import Task
from headprune.units import Member, Site, by_site
from headprune.units.slicing.removal import remaining

log = logging.getLogger(__name__)

# The part of the residual stream's error so far that a site has to correct: this project's, and that of papers.
CATCH_UP: dict[RepairKind, float] = {"dense": 0.75, "scale": 1.0}


@dataclass
class Target:
    """The targets of one site's repair, batch by batch."""

    outputs: ActivationStore  # [tokens x out]: those of the dense model
    streams: ActivationStore | None  # [tokens x out]: the residual stream that they are added to; None if unknown
    weights: list[torch.Tensor] | None  # [tokens]
    applications: int = 1  # how often a pass runs the site, which the structure of a model does not always say
    routed: bool = False  # whether it is an expert, which gets only the tokens that are routed to it
    numbers: list[int] = field(default_factory=list)  # batch numbers in all the data


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
    """Repair these sites in the order of `targets`; sums are kept in this `precision`."""
    repairs = []
    if kind == "none":
        return []
    for index in tracked(targets, "repairing", len(targets), unit="site"):
        site = sites[index]
        output: Any = model.get_submodule(site.o)
        shared = any(count_uses(model, getattr(output, name, None)) > 1 for name in ("weight", "bias"))
        if shared or site.feeds_units or (not site.kept and output.bias is None):
            continue
        # Which tokens are routed to an expert depends on what was pruned before it, so they do not match the targets.
        routed = targets[index].routed
        catch_up = CATCH_UP[kind]
        sums = None if routed else _gather_sums(model, inputs, site, targets[index], catch_up, precision)
        repair = distributed.on_main(functools.partial(_plan, model, site, sums, kind, ridges, routed))
        apply_repair(model, site, repair)
        repairs.append(repair)
    return repairs


def _plan(
    model: PreTrainedModel,
    site: Site,
    sums: Sums | None,
    kind: RepairKind,
    ridges: tuple[float, ...],
    routed: bool,
) -> Repair:
    if sums is None or not torch.isfinite(sums.zz.diagonal(dim1=1, dim2=2)).all():
        reason = "its tokens are chosen by a router" if routed else "its inputs are not finite"
        log.warning("Site %d (%s) is left without repair: %s.", site.index, site.path, reason)
        return Repair(site.index, "none", None, None)
    weight, bias = output_map(model, site)
    units = torch.empty(weight.shape[1], dtype=torch.long)
    units[site.columns(range(site.size))] = torch.arange(weight.shape[1]) // (site.width * site.group)
    return fit(weight, bias, sums, kind, ridges=ridges, units=units, site=site.index)


def _gather_sums(
    model: PreTrainedModel, inputs: SiteInputs, site: Site, target: Target, catch_up: float, precision: torch.dtype
) -> Sums | None:
    """Sums over all batches, which several processes share."""
    sums: Sums | None = None
    weight, bias = output_map(model, site)
    streams = target.streams is not None and catch_up > 0
    site = replace(site, applications=target.applications)
    with distributed.fail_together():
        for number, (tokens, dense_outputs) in enumerate(
            zip(inputs.at(site, streams=streams), target.outputs, strict=True)
        ):
            if not len(dense_outputs):
                continue
            outputs = dense_outputs
            if tokens.stream is not None and target.streams is not None:
                outputs = dense_outputs + catch_up * (target.streams[number] - tokens.stream.cpu())
            # Where no unit is left, a module may still pass something on, which the bias in its place does not read.
            columns = tokens.columns if site.kept else tokens.columns[:, :0]
            if sums is None:
                sums = Sums.blank(columns.shape[1], outputs.shape[1], precision)
            weights = None if target.weights is None else target.weights[number]
            sums.add(columns, outputs, weight, bias, tokens.samples % FOLDS, weights)
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
    """Remove these members in the order in which their sites run, as ZipLM and OSSCAR do: each output map (or, for the
    mean, its bias) is solved towards its outputs with them, on the inputs of the model pruned up to there. The dense
    model is not used, so errors that a repair leaves add up."""
    ids_by_site = by_site(members)
    repairs: list[Repair] = []
    calls = calls_of_sites(model, [sites[index] for index in ids_by_site], batches[0], task)
    current = [replace(site, applications=calls.get(site.index, site.applications)) for site in sites]
    passes = SitePasses(model, sites, batches, task, walkable=is_walkable(model, sites, batches, task))
    order = [*calls, *(index for index in ids_by_site if index not in calls)]
    for index in tracked(order, "repairing", len(order), unit="site"):
        leaving = [Member(index, member) for member in ids_by_site[index]]
        repairs.append(remove_from_site(model, current, index, leaving, passes, kind, verify=verify))
        # Of a site that is done only the ids in the record are read again, so the model is not resolved for every site.
        current[index] = replace(sites[index], kept=tuple(remaining(sites, leaving)[index]))
    return repairs


def remove_from_site(
    model: PreTrainedModel,
    sites: Sequence[Site],
    index: int,
    members: Sequence[Member],
    inputs: SiteInputs,
    kind: RepairKind = "lstsq",
    *,
    verify: Mapping[str, Any] | None = None,
    ridges: tuple[float, ...] = SITE_RIDGES,
    precision: torch.dtype = torch.float64,
) -> Repair:
    """Remove these members of one of the sites, and repair it towards its outputs with them, on its current inputs."""
    site = sites[index]
    gathering = Gathering(precision)
    with distributed.fail_together():
        for tokens in inputs.at(site):
            gathering.add(site.index, tokens.columns, tokens.samples)
    moments = gathering.moments().get(site.index)
    ids = [member.index for member in members]
    repair = distributed.on_main(lambda: plan_repair(model, site, ids, kind, moments, ridges))
    remove_units(model, members, sites=sites, verify=verify)
    apply_repair(model, site, repair)
    return repair


def calls_of_sites(
    model: PreTrainedModel, sites: Sequence[Site], batch: Mapping[str, Any], task: Task
) -> dict[int, int]:
    """How often a forward pass runs each site that it runs, in the order in which it does, by the index of the site."""
    calls: dict[int, int] = {}

    def count(site: Site, columns: torch.Tensor) -> None:
        calls[site.index] = calls.get(site.index, 0) + 1

    sample = task.prepare(task.select(batch, slice(0, 1)), input_device(model))
    with (
        torch.no_grad(),
        evaluating(model),
        site_callbacks(model, sites, output=count),
    ):
        model(**few_logits(model, task.inputs(sample)))
    return calls
