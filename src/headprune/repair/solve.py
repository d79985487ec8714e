"""Least squares at a site's output map: the mathematics, without a model.

A site adds W z + b to the residual stream, z what its members give. Where the columns c of W go, the change of the
kept columns k and of b that best makes up for it minimises E |W_c z_c - D z_k - d|^2, a small regression that the
second moments of z decide. No gradient and no training is needed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headprune.signals.moments import FOLDS, Moments

Compensation = Literal["lstsq", "mean", "none", "site", "scale"]
BUDGETS_ONLY = ("site", "scale")  # go through all sites front to back, as only budgets do
# Ridge terms to choose from, relative to the mean square of the kept outputs.
RIDGES = tuple(10.0**power for power in range(-10, 2))

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Repair:
    """What is done at one site for the heads that go there, and what that does to the site's output.

    Errors are mean squared changes of the output over the calibration tokens, without and with the repair.
    """

    site: int
    kind: Compensation
    error_without: float | None  # both None where nothing could be measured
    error: float | None
    weight: torch.Tensor | None = None  # [out x kept columns]: the new output projection
    bias: torch.Tensor | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("site", "kind", "error_without", "error")}


def solve(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    moments: Moments,
    removed: torch.Tensor,
    compensate: Compensation,
    *,
    site: int = 0,
) -> Repair:
    """The new output projection for a site that loses the `removed` columns of its `weight` [out x in].

    What comes back is never worse on the moments than removal alone, as the precision of the weights rounds it: least
    squares gives way to the mean, and the mean to nothing.
    """
    kept, lost = weight[:, ~removed].double(), weight[:, removed].double()
    without = _error(lost, kept.new_zeros(kept.shape), None, moments, removed)
    for kind in _candidates(compensate, heads_left=not removed.all(), has_bias=bias is not None):
        change = kept.new_zeros(kept.shape)
        if kind == "lstsq":
            try:
                change = least_squares(lost, moments, removed, centred=bias is not None)
            except torch.linalg.LinAlgError as failure:
                log.warning("Least squares has no solution at site %d (%s), so it is not used.", site, failure)
                continue
        shift = None if bias is None else lost @ moments.mean[removed] - change @ moments.mean[~removed]
        new_weight = (kept + change).to(weight.dtype)
        new_bias = None if bias is None or shift is None else (bias.double() + shift).to(bias.dtype)
        rounded = None if bias is None or new_bias is None else new_bias.double() - bias.double()
        error = _error(lost, new_weight.double() - kept, rounded, moments, removed)
        if error <= without:  # False for NaN as well
            return Repair(site, kind, without, error, new_weight, new_bias)
        log.warning(
            "%s would make site %d worse (%.3g instead of %.3g), so it is not used.", kind, site, error, without
        )
    return Repair(site, "none", without, without)


def _candidates(compensate: Compensation, *, heads_left: bool, has_bias: bool) -> list[Compensation]:
    """What can be tried, best first: least squares needs heads that stay, and a mean a bias to go into."""
    possible: dict[Compensation, bool] = {"lstsq": compensate == "lstsq" and heads_left, "mean": has_bias}
    return [kind for kind, can in possible.items() if can and compensate != "none"]


def least_squares(lost: torch.Tensor, moments: Moments, removed: torch.Tensor, *, centred: bool) -> torch.Tensor:
    """D that minimises E |W_c z_c - D z_k|^2, about the means if `centred`, plus a ridge term [out x kept].

    The ridge is the one that does best on samples it was not fitted to: next to none where the removed outputs are a
    linear function of the kept ones, a large one where there is little to learn from.
    """
    spread = moments.covariance() if centred else moments.second()
    inner = spread[~removed][:, ~removed]
    cross = spread[~removed][:, removed] @ lost.t()  # [kept x out]
    scale = inner.diagonal().mean()
    if not scale > 0:
        return cross.new_zeros(cross.shape).t()
    ridge = best_ridge(lost, moments, removed, centred=centred)
    return torch.linalg.solve(inner + ridge * scale * torch.eye(len(inner), dtype=inner.dtype), cross).t()


def best_ridge(lost: torch.Tensor, moments: Moments, removed: torch.Tensor, *, centred: bool) -> float:
    """The ridge, relative to the mean square of the kept outputs, with the least error on the fold that is left out.
    Tokens of one sample are alike, so whole samples are left out. The largest where there is a single sample."""
    if (moments.counts == 0).any():
        return max(RIDGES)
    errors = dict.fromkeys(sorted(RIDGES, reverse=True), 0.0)  # of equal ones the largest
    for fold in range(FOLDS):
        fitted, held_out = moments.only(1 - fold), moments.only(fold)
        centre = fitted.mean if centred else torch.zeros_like(fitted.mean)
        spread, unseen = fitted.about_point(centre), held_out.about_point(centre)
        values, vectors = torch.linalg.eigh(spread[~removed][:, ~removed])
        values = values.clamp_min(0)
        rotated = vectors.t() @ (spread[~removed][:, removed] @ lost.t())
        # |W_c z_c - D z_k|^2 on the unseen samples, in the basis where D is rotated / (values + ridge)
        linear = (rotated * (vectors.t() @ (unseen[~removed][:, removed] @ lost.t()))).sum(1)
        square = (vectors.t() @ unseen[~removed][:, ~removed] @ vectors) * (rotated @ rotated.t())
        for ridge in errors:
            weights = 1 / (values + ridge * values.mean()).clamp_min(torch.finfo(values.dtype).tiny)
            errors[ridge] += float((weights @ square @ weights - 2 * linear @ weights) * held_out.tokens)
    return min(errors, key=lambda ridge: errors[ridge])


def _error(
    lost: torch.Tensor, change: torch.Tensor, shift: torch.Tensor | None, moments: Moments, removed: torch.Tensor
) -> float:
    """E |W_c z_c - D z_k - d|^2 over the tokens of the moments."""
    left_over = lost.new_zeros(len(lost), len(removed))
    left_over[:, removed], left_over[:, ~removed] = lost, -change
    mean = left_over @ moments.mean - (0 if shift is None else shift)
    return float(((left_over @ moments.covariance()) * left_over).sum().clamp_min(0) + mean.square().sum())
