"""Repairing a pruned model front to back: every output map is solved again towards what the dense model gives there.

Each map is fitted to what reaches it through everything pruned and repaired before it, so errors do not pile up.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune import distributed
from headprune.hooks.offload import stored
from headprune.layerwise.activation_store import ActivationStore
from headprune.layerwise.site_tokens import SiteInputs
from headprune.repair.plan import apply_repairs, owners_of
from headprune.repair.scale import best_scales
from headprune.repair.solve import Compensation, Repair
from headprune.repair.towards import RIDGES, Pairs, best_map, pairs_of_all
from headprune.signals.moments import FOLDS
from headprune.units import Site
from headprune.units.linear import is_transposed

log = logging.getLogger(__name__)

# Of how far the stream is off already, the part that a site is to make good: ours, and what the papers of others do.
CATCH_UP: dict[Compensation, float] = {"lstsq": 0.75, "scale": 1.0, "mean": 0.0}


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
    compensate: Compensation = "lstsq",
    *,
    ridges: tuple[float, ...] = RIDGES,
    precision: torch.dtype = torch.float64,
) -> list[Repair]:
    """Repair these sites in the order of `targets`, what the dense model gives at each, batch after batch; the
    sums that this rests on are kept in this `precision`."""
    repairs = []
    if compensate == "none":
        return []
    for index in targets:
        site = sites[index]
        output: Any = model.get_submodule(site.o)
        shared = any(owners_of(model, getattr(output, name, None)) > 1 for name in ("weight", "bias"))
        if shared or (not site.kept and output.bias is None):
            continue
        # Which tokens an expert is given depends on what was pruned before it, so there is nothing to compare with.
        routed = targets[index].routed
        pairs = None if routed else _gathered(inputs, site, targets[index], CATCH_UP[compensate], precision)
        repair = distributed.on_main(functools.partial(_planned, output, site, pairs, compensate, ridges, routed))
        apply_repairs(model, sites, [repair])
        repairs.append(repair)
    return repairs


def _planned(
    output: Any, site: Site, pairs: Pairs | None, compensate: Compensation, ridges: tuple[float, ...], routed: bool
) -> Repair:
    if pairs is None or not torch.isfinite(pairs.zz.diagonal(dim1=1, dim2=2)).all():
        why = "its tokens are chosen for it" if routed else "what it gives is not finite"
        log.warning("Site %d (%s) is left without compensation: %s.", site.index, site.path, why)
        return Repair(site.index, "none", None, None)
    return _repaired(output, site, pairs, compensate, ridges)


def _gathered(inputs: SiteInputs, site: Site, target: Target, catch_up: float, precision: torch.dtype) -> Pairs | None:
    """Sums over all batches, which several processes share."""
    pairs: Pairs | None = None
    streams = target.streams is not None and catch_up > 0
    with distributed.fail_together():
        for number, (seen, wanted) in enumerate(zip(inputs.at(site, streams=streams), target.outputs, strict=True)):
            if not len(wanted):
                continue
            outputs = wanted
            if seen.stream is not None and target.streams is not None:
                outputs = wanted + catch_up * (target.streams[number] - seen.stream.cpu())
            if pairs is None:
                pairs = Pairs.blank(seen.columns.shape[1], outputs.shape[1], precision)
            weights = None if target.weights is None else target.weights[number]
            pairs.add(seen.columns, outputs, seen.samples % FOLDS, weights)
    return pairs_of_all(pairs, precision)


def _repaired(output: Any, site: Site, pairs: Pairs, compensate: Compensation, ridges: tuple[float, ...]) -> Repair:
    bias: torch.Tensor | None = None if output.bias is None else stored(output, "bias").detach().cpu()
    if site.kept:
        weight: torch.Tensor = stored(output).detach()
        weight = (weight.t() if is_transposed(output) else weight).cpu()
    else:
        weight = torch.zeros(pairs.y.shape[1], 0)
    if compensate == "lstsq" and site.kept:
        new, shift, before, after = best_map(weight, bias, pairs, ridges)
        return Repair(site.index, "lstsq", before, after, new, shift)
    if compensate == "scale" and site.kept:
        places = torch.empty(weight.shape[1], dtype=torch.long)
        places[site.columns(range(site.size))] = torch.arange(weight.shape[1]) // (site.width * site.group)
        new, before, after = best_scales(weight, bias, pairs, places)
        return Repair(site.index, "scale", before, after, new)
    before = pairs.error(weight, bias)
    if bias is None or compensate == "scale":
        return Repair(site.index, "none", before, before)
    count = pairs.counts.sum()
    shift = ((pairs.y.sum(0) - weight.to(pairs.z) @ pairs.z.sum(0)) / count).to(bias.dtype)
    after = pairs.error(weight, shift)
    if not after <= before:
        return Repair(site.index, "none", before, before)
    return Repair(site.index, "mean", before, after, None, shift)
