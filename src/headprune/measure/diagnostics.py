"""How far the gradients of all sites change when heads are removed, so that their scores go stale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from headprune.errors import DataError
from headprune.hooks.gates import gate_sites
from headprune.hooks.offload import input_device, refuse_offloaded
from headprune.hooks.outputs import evaluating
from headprune.hooks.site_activations import frozen
from headprune.signals.objectives import logit_norms
from headprune.surgery.check_removable import check_removable
from headprune.tasks import batch_size, task_of
from headprune.units import Head, Site, as_members, resolve, widest
from headprune.units.linear import is_transposed
from headprune.units.spec import ROLES


@dataclass(frozen=True)
class GradientChange:
    """Per site and role, the absolute change of the weight gradient, pooled to a small grid, and its relative size."""

    removed: list[Head]
    grids: torch.Tensor  # [sites x 3 x grid x grid], roles in the order q, k, v
    relative: torch.Tensor  # [sites x 3]: norm of the change / norm of the gradient before


def gradient_change(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Any]],
    heads: Iterable[tuple[int, int]],
    *,
    grid: int = 8,
) -> GradientChange:
    """Compare the Q, K and V weight gradients of every site before and after removing `heads`.

    The gradient is that of the mean over samples of the norm of the logits. The heads are gated to zero, which
    computes the same as removing them and leaves the model and the shapes of all gradients as they are.
    """
    sites = resolve(model)
    chosen = as_members(heads)
    check_removable(sites, chosen)
    if not chosen:
        raise DataError("Name at least one head to remove; otherwise nothing changes.")
    data = list(batches)
    if not data:
        raise DataError("There are no batches to compute gradients on; give at least one.")
    refuse_offloaded(model, "asked for gradients of its weights")
    gates = torch.ones(len(sites), widest(sites), device=input_device(model))
    before = _weight_gradients(model, sites, data, gates)
    for head in chosen:
        gates[head.site, head.index] = 0.0
    after = _weight_gradients(model, sites, data, gates)
    grids = torch.zeros(len(sites), len(ROLES), grid, grid)
    relative = torch.zeros(len(sites), len(ROLES))
    for (site, role), old in before.items():
        change = after[site, role] - old
        grids[site, role] = functional.adaptive_avg_pool2d(change.abs()[None, None], grid)[0, 0]
        relative[site, role] = change.norm() / old.norm().clamp_min(torch.finfo(old.dtype).tiny)
    return GradientChange(chosen, grids, relative)


def _weight_gradients(
    model: PreTrainedModel, sites: Sequence[Site], batches: Sequence[Mapping[str, Any]], gates: torch.Tensor
) -> dict[tuple[int, int], torch.Tensor]:
    """(site, role) -> gradient [rows x in] of the head rows of that role, mean over samples."""
    paths = dict.fromkeys(axis.module for site in sites if site.kept for axis in site.roles.values())
    totals: dict[str, torch.Tensor] = {}
    task = task_of(model)
    samples = 0
    with evaluating(model), frozen(model), gate_sites(model, sites, gates):
        weights: dict[str, Any] = {path: model.get_submodule(path).weight for path in paths}
        try:
            for weight in weights.values():
                weight.requires_grad_(True)
            for batch in batches:
                inputs = task.prepare(batch, gates.device)
                scalar = logit_norms(task, task.logits(model(**task.inputs(inputs))), inputs).sum()
                for path, gradient in zip(paths, torch.autograd.grad(scalar, list(weights.values())), strict=True):
                    totals[path] = totals.get(path, torch.zeros(())).to(gradient.device) + gradient.float()
                samples += batch_size(batch)
        finally:
            for weight in weights.values():
                weight.requires_grad_(False)
    result = {}
    for site in sites:
        for number, role in enumerate(ROLES if site.kept else ()):
            axis = site.roles[role]
            gradient = totals[axis.module] / samples
            outputs_last = gradient if is_transposed(model.get_submodule(axis.module)) else gradient.T
            result[site.index, number] = axis.split(outputs_last).flatten(-2).T.cpu()
    return result
