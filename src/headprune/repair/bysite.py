"""Site after site, as ZipLM and OSSCAR do: units leave a site, what stays makes up for them, and the next site follows.

Each output map is solved towards what it gave, unpruned, on what reaches it through the sites before it. Nothing looks
back at the dense model, so what one site could not make good is carried on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.batches import rows_of
from headprune.hooks.logits import few_logits
from headprune.hooks.offload import input_device
from headprune.hooks.outputs import evaluating
from headprune.hooks.watch import watched
from headprune.repair.plan import apply_repairs, plan_repairs
from headprune.repair.solve import Repair
from headprune.surgery.cut import cut
from headprune.tasks import Task
from headprune.units import Member, Site
from headprune.units.members import by_site


def remove_by_site(
    model: PreTrainedModel,
    sites: Sequence[Site],
    members: Sequence[Member],
    batches: Sequence[Mapping[str, Any]],
    task: Task,
    verify: Mapping[str, Any] | None = None,
) -> list[Repair]:
    """Remove these members in the order in which their sites run, each site solved again before the next."""
    going = by_site(members)
    repairs: list[Repair] = []
    for index in running_order(model, [sites[index] for index in going], batches[0], task):
        own = [Member(index, member) for member in going[index]]
        planned = plan_repairs(model, sites, own, "lstsq", batches, task)
        cut(model, own, verify=verify)
        apply_repairs(model, sites, planned)
        repairs += [dataclasses.replace(one, kind="site" if one.kind == "lstsq" else one.kind) for one in planned]
        verify = None  # all sites are cut alike
    return repairs


def running_order(model: PreTrainedModel, sites: Sequence[Site], batch: Mapping[str, Any], task: Task) -> list[int]:
    """Indices of sites in the order in which a forward pass comes to them, and last of those that it does not reach."""
    seen: dict[int, None] = {}
    one = task.prepare(rows_of(batch, slice(0, 1)), input_device(model))
    with (
        torch.no_grad(),
        evaluating(model),
        watched(model, sites, output=lambda site, columns: seen.setdefault(site.index)),
    ):
        model(**few_logits(model, task.inputs(one)))
    return [*seen, *(site.index for site in sites if site.index not in seen)]
