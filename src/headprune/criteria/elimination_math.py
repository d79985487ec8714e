"""Backward elimination at one site: the mathematics.

With H the covariance of the inputs of the output map W (second moments where it has no bias), P its inverse and M the
metric of errors, removing the columns S and solving the others again costs tr(M W_S (P_SS)^-1 W_S^T). The remaining
weights become W - W_S (P_SS)^-1 P_S, and the inverse P - P_S^T (P_SS)^-1 P_S. So one inverse gives the order of all
units and the error at every width.
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

STAGES = 8  # 1/STAGES of the remaining neurons are removed at once; heads one by one
WIDTH_RATIO = 0.8  # between consecutive widths of a feed-forward layer at which errors are measured


def site_scores(
    model: PreTrainedModel, site: Site, sensitivity: Sensitivity, *, ridge: float, metric: str = "gradient"
) -> torch.Tensor:
    """The rise of the error when the unit of each member is removed in its turn, [members]."""
    if metric == "output":
        sensitivity = replace(sensitivity, gradients=[])  # which another criterion may have requested
    output: Any = model.get_submodule(site.o)
    order = torch.tensor(site.columns(range(site.size)))
    weight = stored(output).detach()
    weight = widened(weight.t() if is_transposed(output) else weight).cpu()[:, order]
    inputs = sensitivity.inputs[:, order]
    share = sensitivity.weights
    if output.bias is not None:
        inputs = inputs - (inputs * share[:, None]).sum(0) / share.sum()
    spread = (inputs.t() @ (inputs * share[:, None])).double() / float(share.sum())
    measure = sensitivity.metric(len(weight))
    if not torch.isfinite(spread).all() or not torch.isfinite(measure).all():
        return torch.full((site.size,), torch.nan, dtype=torch.float64)
    width = site.width * site.group
    held_out = HeldOutError(sensitivity, inputs, weight, share, ridge) if sensitivity.gradients else None
    errors: list[float] = []
    counts: list[int] = []
    sequence: list[int] = []
    last_width = float("inf")
    total = weight.shape[1] // width
    for units_leaving, left, error in eliminate(weight.double(), spread, measure, width, ridge):
        sequence += units_leaving
        if width == 1 and len(left) > WIDTH_RATIO * last_width and len(left):
            continue
        last_width = len(left)
        if held_out is not None:
            error = held_out.error(left)
        errors.append(error)
        counts.append(len(sequence) - sum(counts))
    assert len(sequence) == total
    scores = torch.zeros(total, dtype=torch.float64)
    for turn, (unit, rise) in enumerate(zip(sequence, convex_rises(errors, counts), strict=True)):
        # Of units that cost the same, those that left later count as more important.
        scores[unit] = rise * (1 + 1e-9 * turn) + 1e-300 * turn
    return scores.repeat_interleave(site.group)


class HeldOutError:
    """The error of a site with some of its columns, solved again by least squares, on samples that were not used to
    solve: a wide layer can fit anything."""

    def __init__(
        self, sensitivity: Sensitivity, inputs: torch.Tensor, weight: torch.Tensor, share: torch.Tensor, ridge: float
    ) -> None:
        self.sensitivity, self.inputs, self.weight, self.ridge = sensitivity, inputs, weight, ridge
        self.outputs = outputs = inputs @ weight.t()
        self.fold = sensitivity.folds
        self.products, self.crosses = [], []
        for fold in range(FOLDS):
            in_fold = self.fold == fold
            weighted = inputs[in_fold] * (share[in_fold, None] / share.sum())
            self.products.append(weighted.t() @ inputs[in_fold])
            self.crosses.append(weighted.t() @ outputs[in_fold])

    def error(self, left: torch.Tensor) -> float:
        """The mean over samples of the squared effect on the logits, with these columns left."""
        staying = self.weight[:, left].t()
        change = self.outputs - self.inputs[:, left] @ staying  # the part of the removed columns
        if len(left):
            for fold in range(FOLDS):
                if not bool((self.fold != fold).any()):
                    continue
                inner = self.products[1 - fold][left][:, left]
                cross = self.crosses[1 - fold][left] - inner @ staying
                inner.diagonal().add_(self.ridge * inner.diagonal().mean().clamp_min(torch.finfo(inner.dtype).tiny))
                factor, failed = torch.linalg.cholesky_ex(inner)
                if not int(failed):
                    in_fold = self.fold == fold
                    change[in_fold] -= self.inputs[in_fold][:, left] @ torch.cholesky_solve(cross, factor)
        return self.sensitivity.effect(change)


def eliminate(
    weight: torch.Tensor, spread: torch.Tensor, metric: torch.Tensor, width: int, ridge: float, stages: int = STAGES
) -> Iterator[tuple[list[int], torch.Tensor, float]]:
    """Yields the units of `width` columns that are removed together, the remaining columns, and the error on the data
    that the order comes from, until no column remains."""
    ridged = spread.clone()
    ridged.diagonal().add_(ridge * spread.diagonal().mean().clamp_min(torch.finfo(spread.dtype).tiny))
    del spread  # of a wide layer each of these is large
    precision = torch.cholesky_inverse(torch.linalg.cholesky(ridged))
    del ridged
    units = torch.arange(weight.shape[1] // width)
    columns = torch.arange(weight.shape[1])
    error = 0.0
    while len(units):
        count = 1 if width > 1 else max(1, len(units) // stages)
        pick = _costs(weight, precision, metric, width).argsort(stable=True)[:count]
        removed = torch.zeros(len(units), dtype=torch.bool)
        removed[pick] = True
        removed_columns = removed.repeat_interleave(width)
        lost, left = removed_columns.nonzero().flatten(), (~removed_columns).nonzero().flatten()
        factor = torch.linalg.cholesky(precision[lost][:, lost])
        across = precision[lost[:, None], left]
        carried = torch.cholesky_solve(torch.cat([weight[:, lost].t(), across], 1), factor)
        solved, spill = carried[:, : len(weight)], carried[:, len(weight) :]
        error += float(((metric @ weight[:, lost]) * solved.t()).sum())
        weight = weight[:, left] - weight[:, lost] @ spill
        precision = precision[left[:, None], left].addmm_(across.t(), spill, alpha=-1)
        columns = columns[left]
        yield units[pick].tolist(), columns, error
        units = units[~removed]


def _costs(weight: torch.Tensor, precision: torch.Tensor, metric: torch.Tensor, width: int) -> torch.Tensor:
    """The cost of each unit if it were the only one removed now."""
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
    """For every unit in the order of removal, the slope of the convex curve below the errors: it never falls along the
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


def _slope(first: tuple[int, float], second: tuple[int, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])
