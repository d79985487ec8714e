"""Backward elimination at one site: the mathematics.

With H the covariance of what the output map W is given (second moments where it has no bias), P its inverse and M the
metric of errors, removing the columns S and solving the others again costs tr(M W_S (P_SS)^-1 W_S^T); what stays
becomes W - W_S (P_SS)^-1 P_S, and its inverse P - P_S^T (P_SS)^-1 P_S. So one inverse gives the order of all units and
the error at every width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from headprune.batches import widened
from headprune.hooks.offload import stored
from headprune.signals.moments import FOLDS
from headprune.signals.sensitivity import Sensitivity
from headprune.units import Site
from headprune.units.linear import is_transposed

STAGES = 8  # of the neurons that are left, one part in so many goes at once; heads go one by one
APART = 0.8  # widths of a feed-forward layer at which errors are measured: each this part of the last


def site_scores(
    model: PreTrainedModel, site: Site, found: Sensitivity, *, ridge: float, metric: str = "gradient"
) -> torch.Tensor:
    """What the error rises by when the turn of each member comes, [members], its unit's rise given to each."""
    if metric == "output":
        found = replace(found, gradients=[])  # which another criterion may have asked for
    output: Any = model.get_submodule(site.o)
    order = torch.tensor(site.columns(range(site.size)))
    weight = stored(output).detach()
    weight = widened(weight.t() if is_transposed(output) else weight).cpu()[:, order]
    inputs = found.inputs[:, order]
    share = found.weights
    if output.bias is not None:
        inputs = inputs - (inputs * share[:, None]).sum(0) / share.sum()
    spread = (inputs.t() @ (inputs * share[:, None])).double() / float(share.sum())
    measure = found.metric(len(weight))
    if not torch.isfinite(spread).all() or not torch.isfinite(measure).all():
        return torch.full((site.size,), torch.nan, dtype=torch.float64)
    width = site.width * site.group
    unseen = Unseen(found, inputs, weight, share, ridge) if found.gradients else None
    errors: list[float] = []
    counts: list[int] = []
    sequence: list[int] = []
    measured_at = float("inf")
    total = weight.shape[1] // width
    for gone, left, error in eliminate(weight.double(), spread, measure, width, ridge):
        sequence += gone
        if width == 1 and len(left) > APART * measured_at and len(left):
            continue
        measured_at = len(left)
        if unseen is not None:
            error = unseen.error(left)
        errors.append(error)
        counts.append(len(sequence) - sum(counts))
    assert len(sequence) == total
    scores = torch.zeros(total, dtype=torch.float64)
    for place, (unit, rise) in enumerate(zip(sequence, convex_rises(errors, counts), strict=True)):
        # Of units that cost the same, those that left later count as more important.
        scores[unit] = rise * (1 + 1e-9 * place) + 1e-300 * place
    return scores.repeat_interleave(site.group)


class Unseen:
    """What is missed when some columns of a site take over what the others added, on samples that the solution has not
    seen: a wide layer can express anything that it is fitted to."""

    def __init__(
        self, found: Sensitivity, inputs: torch.Tensor, weight: torch.Tensor, share: torch.Tensor, ridge: float
    ) -> None:
        self.found, self.inputs, self.weight, self.ridge = found, inputs, weight, ridge
        self.wanted = wanted = inputs @ weight.t()
        self.fold = found.samples % FOLDS
        self.products, self.crosses = [], []
        for fold in range(FOLDS):
            own = self.fold == fold
            weighted = inputs[own] * (share[own, None] / share.sum())
            self.products.append(weighted.t() @ inputs[own])
            self.crosses.append(weighted.t() @ wanted[own])

    def error(self, left: torch.Tensor) -> float:
        """The mean over samples of the squared effect on the logits, with these columns left."""
        staying = self.weight[:, left].t()
        change = self.wanted - self.inputs[:, left] @ staying  # what the columns that go have added
        if len(left):
            for fold in range(FOLDS):
                if not bool((self.fold != fold).any()):
                    continue
                inner = self.products[1 - fold][left][:, left]
                cross = self.crosses[1 - fold][left] - inner @ staying
                inner.diagonal().add_(self.ridge * inner.diagonal().mean().clamp_min(torch.finfo(inner.dtype).tiny))
                factor, failed = torch.linalg.cholesky_ex(inner)
                if not int(failed):
                    own = self.fold == fold
                    change[own] -= self.inputs[own][:, left] @ torch.cholesky_solve(cross, factor)
        return self.found.effect(change)


def eliminate(
    weight: torch.Tensor, spread: torch.Tensor, metric: torch.Tensor, width: int, ridge: float, stages: int = STAGES
) -> Iterator[tuple[list[int], torch.Tensor, float]]:
    """Each time: the units of `width` columns that leave together, the columns that are left, and the error on the data
    that the order comes from, until nothing is left."""
    held = spread.clone()
    held.diagonal().add_(ridge * spread.diagonal().mean().clamp_min(torch.finfo(spread.dtype).tiny))
    del spread  # of a wide layer each of these is large
    precision = torch.cholesky_inverse(torch.linalg.cholesky(held))
    del held
    units = torch.arange(weight.shape[1] // width)
    columns = torch.arange(weight.shape[1])
    error = 0.0
    while len(units):
        count = 1 if width > 1 else max(1, len(units) // stages)
        pick = _costs(weight, precision, metric, width).argsort(stable=True)[:count]
        gone = torch.zeros(len(units), dtype=torch.bool)
        gone[pick] = True
        losing = gone.repeat_interleave(width)
        lost, left = losing.nonzero().flatten(), (~losing).nonzero().flatten()
        factor = torch.linalg.cholesky(precision[lost][:, lost])
        across = precision[lost[:, None], left]
        carried = torch.cholesky_solve(torch.cat([weight[:, lost].t(), across], 1), factor)
        solved, spill = carried[:, : len(weight)], carried[:, len(weight) :]
        error += float(((metric @ weight[:, lost]) * solved.t()).sum())
        weight = weight[:, left] - weight[:, lost] @ spill
        precision = precision[left[:, None], left].addmm_(across.t(), spill, alpha=-1)
        columns = columns[left]
        yield units[pick].tolist(), columns, error
        units = units[~gone]


def _costs(weight: torch.Tensor, precision: torch.Tensor, metric: torch.Tensor, width: int) -> torch.Tensor:
    """What each unit would cost if it left alone now."""
    measured = metric @ weight
    if width == 1:
        return (weight * measured).sum(0) / precision.diagonal()
    blocks = torch.stack([precision[i : i + width, i : i + width] for i in range(0, len(precision), width)])
    grams = torch.stack(
        [weight[:, i : i + width].t() @ measured[:, i : i + width] for i in range(0, len(precision), width)]
    )
    # By Cholesky, which these blocks have: batched LU of some math libraries fails on blocks of a hundred columns.
    solved = torch.cholesky_solve(grams, torch.linalg.cholesky(blocks))
    return solved.diagonal(dim1=1, dim2=2).sum(1)


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
