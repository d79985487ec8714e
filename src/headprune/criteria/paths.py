"""Backward elimination at one site: the mathematics.

With H the covariance of what the output map W is given (second moments where it has no bias), P its inverse and M the
metric of errors, removing the columns S and solving the others again costs tr(M W_S (P_SS)^-1 W_S^T); what stays
becomes W - W_S (P_SS)^-1 P_S, and its inverse P - P_S^T (P_SS)^-1 P_S. So one inverse gives the order of all units and
the error at every width.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.signals.sensitivity import Sensitivity
from headprune.units import Site
from headprune.units.linear import is_transposed

STAGES = 16  # of the neurons that are left, one part in so many goes at once; heads go one by one


def site_scores(model: PreTrainedModel, site: Site, found: Sensitivity | None, *, ridge: float) -> torch.Tensor:
    """What the error rises by when the turn of each member comes, [members], its unit's rise given to each."""
    if found is None:  # nothing but padding has passed here
        return torch.zeros(site.size, dtype=torch.float64)
    output: Any = model.get_submodule(site.o)
    weight = (output.weight.t() if is_transposed(output) else output.weight).detach().double().cpu()
    spread = found.moments.covariance() if output.bias is not None else found.moments.second()
    if not torch.isfinite(spread).all() or not torch.isfinite(found.metric).all():
        return torch.full((site.size,), torch.nan, dtype=torch.float64)
    tokens = max(found.moments.tokens, 1)
    metric = found.metric / tokens if len(found.metric) else torch.eye(len(weight), dtype=torch.float64)
    order = torch.tensor(site.columns(range(site.size)))
    weight, spread = weight[:, order], spread[order][:, order]
    removed, errors = eliminate(weight, spread, metric, site.width * site.group, ridge)
    mean = found.moments.mean[order] if output.bias is not None else torch.zeros_like(found.moments.mean)
    scale = _scale(found, weight, spread, metric, mean)
    rises = convex_rises([error * scale for error in errors], [len(done) for done in removed])
    scores = torch.zeros(site.size // site.group, dtype=torch.float64)
    sequence = [unit for done in removed for unit in done]
    for place, (unit, rise) in enumerate(zip(sequence, rises, strict=True)):
        # Of units that cost the same, those that left later count as more important.
        scores[unit] = rise * (1 + 1e-9 * place) + 1e-300 * place
    return scores.repeat_interleave(site.group)


def _scale(
    found: Sensitivity, weight: torch.Tensor, spread: torch.Tensor, metric: torch.Tensor, mean: torch.Tensor
) -> float:
    """From the error of a token to that of a sample: tokens of one sample pull together, or against each other, which
    the error of removing everything tells."""
    alone = float(((weight @ spread) * (metric @ weight)).sum())
    together = found.whole(weight, mean)
    return together / alone if alone > 0 and together > 0 else 1.0


def eliminate(
    weight: torch.Tensor, spread: torch.Tensor, metric: torch.Tensor, width: int, ridge: float, stages: int = STAGES
) -> tuple[list[list[int]], list[float]]:
    """(units that left together, first ones first; the error after each time) for units of `width` columns."""
    held = spread.clone()
    held.diagonal().add_(ridge * spread.diagonal().mean().clamp_min(torch.finfo(torch.float64).tiny))
    precision = torch.cholesky_inverse(torch.linalg.cholesky(held))
    weight = weight.clone()
    units = torch.arange(weight.shape[1] // width)
    removed: list[list[int]] = []
    errors: list[float] = []
    error = 0.0
    while len(units):
        count = 1 if width > 1 else max(1, len(units) // stages)
        pick = _costs(weight, precision, metric, width).argsort(stable=True)[:count]
        gone = torch.zeros(len(units), dtype=torch.bool)
        gone[pick] = True
        columns = gone.repeat_interleave(width)
        lost, left = columns.nonzero().flatten(), (~columns).nonzero().flatten()
        factor = torch.linalg.cholesky(precision[lost][:, lost])
        carried = torch.cholesky_solve(torch.cat([weight[:, lost].t(), precision[lost][:, left]], 1), factor)
        solved, spill = carried[:, : len(weight)], carried[:, len(weight) :]
        error += float(((metric @ weight[:, lost]) * solved.t()).sum())
        weight = weight[:, left] - weight[:, lost] @ spill
        precision = precision[left][:, left] - precision[left][:, lost] @ spill
        removed.append(units[pick].tolist())
        errors.append(error)
        units = units[~gone]
    return removed, errors


def _costs(weight: torch.Tensor, precision: torch.Tensor, metric: torch.Tensor, width: int) -> torch.Tensor:
    """What each unit would cost if it left alone now."""
    measured = metric @ weight
    if width == 1:
        return (weight * measured).sum(0) / precision.diagonal()
    blocks = torch.stack([precision[i : i + width, i : i + width] for i in range(0, len(precision), width)])
    grams = torch.stack(
        [weight[:, i : i + width].t() @ measured[:, i : i + width] for i in range(0, len(precision), width)]
    )
    return torch.linalg.solve(blocks, grams).diagonal(dim1=1, dim2=2).sum(1)


def convex_rises(errors: Sequence[float], counts: Sequence[int]) -> list[float]:
    """For every unit in the order of leaving, the slope of the convex curve below the errors: it never falls along the
    order, and adds up to the error where the curve is convex."""
    points = [(0, 0.0)]
    for error, count in zip(errors, counts, strict=True):
        points.append((points[-1][0] + count, max(error, points[-1][1])))
    hull: list[tuple[int, float]] = []
    for point in points:
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    rises: list[float] = []
    for before, after in itertools.pairwise(hull):
        rises += [_slope(before, after)] * (after[0] - before[0])
    return rises


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])
