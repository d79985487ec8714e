"""Repairs of a model: planned before its units are removed, from its activations on calibration data, applied after."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from headprune import distributed
from headprune.errors import DataError
from headprune.hooks.offload import put, stored
from headprune.repair.regression import BUDGETS_ONLY, SITE_RIDGES, Repair, RepairKind, Sums, fit
from headprune.signals.moments import Moments, gather
from headprune.tasks import Task
from headprune.units import Member, Site, by_site, resolve
from headprune.units.linear import is_transposed

log = logging.getLogger(__name__)


def check_repair(
    word: str, model: PreTrainedModel | None = None, *, published: bool = False, budget: bool = True
) -> RepairKind:
    """The word, unless it is unknown or not possible for this model; a published method then runs without repair.
    Without a `budget` there are fewer kinds."""
    words = [kind for kind in get_args(RepairKind) if budget or kind not in BUDGETS_ONLY]
    if word not in words:
        raise DataError(f"There is no repair {word!r}; choose one of {', '.join(words)}.")
    if word == "mean" and model is not None:
        outputs = [model.get_submodule(site.o) for site in resolve(model)]
        if all(getattr(output, "bias", None) is None for output in outputs):
            if published:
                log.warning("This model has no output biases to absorb means, so nothing is repaired.")
                return "none"
            raise DataError(
                "repair='mean' moves means into output biases, and this model has none; use 'lstsq' or 'none'."
            )
    return cast(RepairKind, word)


def plan_repairs(
    model: PreTrainedModel,
    sites: Sequence[Site],
    members: Iterable[Member],
    kind: RepairKind,
    batches: Iterable[Mapping[str, Any]],
    task: Task,
    moments: Mapping[int, Moments] | None = None,
) -> list[Repair]:
    """The repair of each site that these members are removed from, from the model before their removal.

    `moments` are those of this model on these batches, where they are known already.
    """
    ids_by_site = by_site(members)
    if kind == "none":
        return []
    moments_by_site = (
        gather(model, [sites[index] for index in ids_by_site], batches, task) if moments is None else moments
    )
    return distributed.on_main(
        lambda: [
            plan_repair(model, sites[index], ids, kind, moments_by_site.get(index), SITE_RIDGES)
            for index, ids in sorted(ids_by_site.items())
        ]
    )


def plan_repair(
    model: PreTrainedModel,
    site: Site,
    ids: Sequence[int],
    kind: RepairKind,
    moments: Moments | None,
    ridges: tuple[float, ...],
) -> Repair:
    """The repair of one site that these members are removed from, from the moments of its inputs before that."""
    output: Any = model.get_submodule(site.o)
    shared = [name for name in ("weight", "bias") if count_uses(model, getattr(output, name)) > 1]
    if moments is None or shared or site.feeds_units or not torch.isfinite(moments.products).all():
        reason = (
            f"its {shared[0]} belongs to other modules as well"
            if shared
            else "its outputs are the units of another site"
            if site.feeds_units
            else "no calibration token but padding reaches it"
            if moments is None
            else f"outputs of its {site.kind} are not finite"
        )
        log.warning("Site %d (%s) is left without repair: %s.", site.index, site.path, reason)
        return Repair(site.index, "none", None, None)
    removed = torch.zeros(site.size * site.width, dtype=torch.bool)
    removed[site.columns(site.position(member) for member in ids)] = True
    weight, bias = output_map(model, site)
    sums = Sums.of_removal(weight, removed, moments)
    return fit(weight[:, ~removed], bias, sums, kind, ridges=ridges, site=site.index)


def output_map(model: PreTrainedModel, site: Site) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight [out x in] of a site's output map, and its bias, as they are stored; without columns where no unit is
    left."""
    output: Any = model.get_submodule(site.o)
    bias = None if output.bias is None else stored(output, "bias").detach().cpu()
    if not site.kept:
        return torch.zeros(0 if bias is None else len(bias), 0), bias
    weight = stored(output).detach()
    return (weight.t() if is_transposed(output) else weight).cpu(), bias


def apply_repairs(model: PreTrainedModel, sites: Sequence[Site], repairs: Iterable[Repair]) -> None:
    """Set the new weights, after the units are removed."""
    for repair in repairs:
        apply_repair(model, sites[repair.site], repair)


def apply_repair(model: PreTrainedModel, site: Site, repair: Repair) -> None:
    """Parameters are replaced, never written in place."""
    output: Any = model.get_submodule(site.o)
    for name, value in (("weight", repair.weight), ("bias", repair.bias)):
        old = getattr(output, name, None)  # a site without units has a bias alone
        if value is not None and old is not None:
            value = value.t().contiguous() if name == "weight" and is_transposed(output) else value
            value = value if old.is_meta else value.to(old.device)
            put(output, name, nn.Parameter(value, requires_grad=old.requires_grad))


def count_uses(model: nn.Module, parameter: nn.Parameter | None) -> int:
    return sum(
        other is parameter
        for module in model.modules()
        for other in module._parameters.values()
        if parameter is not None
    )
