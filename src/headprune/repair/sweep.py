"""Repairing a pruned model front to back: every output map is solved again towards what the dense model gives there.

Each map is fitted to what reaches it through everything pruned and repaired before it, so errors do not pile up.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.repair.passes import Passes, given_outputs
from headprune.repair.plan import apply_repairs, owners_of
from headprune.repair.solve import Compensation, Repair
from headprune.repair.towards import RIDGES, Pairs, best_map
from headprune.signals.moments import FOLDS
from headprune.task import Task
from headprune.units import Site
from headprune.units.linear import is_transposed

log = logging.getLogger(__name__)


class DenseOutputs:
    """What a dense model gives at its sites on the calibration data, for repairs of what becomes of it."""

    def __init__(
        self, model: PreTrainedModel, sites: Sequence[Site], batches: Sequence[Mapping[str, Any]], task: Task
    ) -> None:
        self.batches, self.task = batches, task
        self.targets = given_outputs(model, sites, batches, task)
        self.forwards = 1.0  # passes over the data so far

    def repair(self, model: PreTrainedModel, sites: Sequence[Site], compensate: Compensation) -> list[Repair]:
        """Repair all sites of the model as it is now."""
        passes = Passes(model, sites, self.batches, self.task)
        repairs = sweep(model, sites, self.targets, passes, compensate)
        self.forwards += passes.forwards
        return repairs


def sweep(
    model: PreTrainedModel,
    sites: Sequence[Site],
    targets: Mapping[int, Sequence[torch.Tensor]],
    passes: Passes,
    compensate: Compensation = "lstsq",
    *,
    ridges: tuple[float, ...] = RIDGES,
) -> list[Repair]:
    """Repair these sites in the order of `targets`, what the dense model gives at each, batch after batch."""
    repairs = []
    if compensate == "none":
        return []
    for index in targets:
        site = sites[index]
        output: Any = model.get_submodule(site.o)
        shared = any(owners_of(model, getattr(output, name, None)) > 1 for name in ("weight", "bias"))
        if shared or not targets[index] or (not site.kept and output.bias is None):
            continue
        pairs = _gathered(passes, site, targets[index])
        if pairs is None or not torch.isfinite(pairs.zz).all():
            log.warning("Site %d (%s) is left without compensation: what it gives is not finite.", index, site.path)
            repairs.append(Repair(index, "none", None, None))
            continue
        repair = _repaired(output, site, pairs, compensate, ridges)
        apply_repairs(model, sites, [repair])
        repairs.append(repair)
    return repairs


def _gathered(passes: Passes, site: Site, wanted: Sequence[torch.Tensor]) -> Pairs | None:
    pairs: Pairs | None = None
    for (columns, samples), outputs in zip(passes.at(site), wanted, strict=True):
        if pairs is None:
            pairs = Pairs.blank(columns.shape[1], outputs.shape[1])
        pairs.add(columns, outputs, samples % FOLDS)
    return pairs


def _repaired(output: Any, site: Site, pairs: Pairs, compensate: Compensation, ridges: tuple[float, ...]) -> Repair:
    bias: torch.Tensor | None = None if output.bias is None else output.bias.detach().cpu()
    if site.kept:
        weight: torch.Tensor = output.weight.detach()
        weight = (weight.t() if is_transposed(output) else weight).cpu()
    else:
        weight = torch.zeros(pairs.y.shape[1], 0)
    if compensate == "lstsq" and site.kept:
        new, shift, before, after = best_map(weight, bias, pairs, ridges)
        return Repair(site.index, "lstsq", before, after, new, shift)
    before = pairs.error(weight, bias)
    if bias is None:
        return Repair(site.index, "none", before, before)
    count = pairs.counts.sum()
    shift = ((pairs.y.sum(0) - weight.double() @ pairs.z.sum(0)) / count).to(bias.dtype)
    after = pairs.error(weight, shift)
    if not after <= before:
        return Repair(site.index, "none", before, before)
    return Repair(site.index, "mean", before, after, None, shift)
