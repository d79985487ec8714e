"""Least squares towards outputs that are given: the mathematics, without a model.

A site of a pruned model is to give what the dense model gave there, y, from what it has now, z. The output map that
does it best minimises E |y - W z - b|^2; a ridge term holds it near the map that is there, as strongly as serves
samples it was not fitted to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headprune import distributed
from headprune.signals.moments import FOLDS

# Of the mean square of the wanted outputs: models compute them in float32, whose rounding squared is 1e-14 per term of
# a sum, and no unit that does anything is missed by as little as this. Sums in float32 round by more themselves.
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-6}
RIDGES = (1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1000.0)  # relative to the mean square of the inputs


@dataclass
class Pairs:
    """Sums over tokens of inputs z and wanted outputs y, by fold of the samples, in float64 unless asked otherwise."""

    counts: torch.Tensor  # [folds], of tokens or of their weights
    z: torch.Tensor  # [folds x in]
    y: torch.Tensor  # [folds x out]
    zz: torch.Tensor  # [folds x in x in]
    zy: torch.Tensor  # [folds x in x out]
    yy: torch.Tensor  # [folds], sums of squares

    @classmethod
    def blank(cls, inputs: int, outputs: int, kind: torch.dtype = torch.float64) -> Pairs:
        return cls(
            torch.zeros(FOLDS, dtype=kind),
            torch.zeros(FOLDS, inputs, dtype=kind),
            torch.zeros(FOLDS, outputs, dtype=kind),
            torch.zeros(FOLDS, inputs, inputs, dtype=kind),
            torch.zeros(FOLDS, inputs, outputs, dtype=kind),
            torch.zeros(FOLDS, dtype=kind),
        )

    def add(self, z: torch.Tensor, y: torch.Tensor, folds: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Take in tokens [tokens x in], [tokens x out] of samples in these folds, each with its weight."""
        for fold in range(FOLDS):
            own = folds == fold
            inputs, outputs = z[own].to(self.zz).cpu(), y[own].to(self.zz)
            share = self.zz.new_ones(len(inputs)) if weights is None else weights[own].to(self.zz)
            weighted = inputs * share[:, None]
            self.counts[fold] += share.sum()
            self.z[fold] += weighted.sum(0)
            self.y[fold] += (outputs * share[:, None]).sum(0)
            self.zz[fold].addmm_(weighted.t(), inputs)  # in place: of a wide layer it is a gigabyte
            self.zy[fold].addmm_(weighted.t(), outputs)
            self.yy[fold] += (outputs.square().sum(1) * share).sum()

    def only(self, fold: int) -> Pairs:
        part = slice(fold, fold + 1)
        return Pairs(self.counts[part], self.z[part], self.y[part], self.zz[part], self.zy[part], self.yy[part])

    def means(self) -> tuple[torch.Tensor, ...]:
        """The count, and the means of z, y, z z^T and z y^T, as tensors of their own."""
        count = self.counts.sum().clamp_min(torch.finfo(self.counts.dtype).tiny)
        return count, *(part.sum(0).div_(count) for part in (self.z, self.y, self.zz, self.zy))

    def error(self, weight: torch.Tensor, bias: torch.Tensor | None) -> float:
        """E |y - W z - b|^2, and 0 where that is no more than the rounding of what it is the difference of."""
        count = self.counts.sum().clamp_min(torch.finfo(self.counts.dtype).tiny)
        z, y = self.z.sum(0) / count, self.y.sum(0) / count
        shift = y.new_zeros(y.shape) if bias is None else bias.to(y)
        weight = weight.to(y)
        # Fold by fold, since a sum of both would be as large as they are.
        square = sum(((weight @ zz) * weight).sum() for zz in self.zz) / count
        cross = sum((weight.t() * zy).sum() for zy in self.zy) / count
        wanted = self.yy.sum() / count
        shifted = shift.square().sum() + 2 * shift @ (weight @ z) - 2 * shift @ y
        found = float(wanted + square + shifted - 2 * cross)
        return 0.0 if found <= ROUNDING[self.zz.dtype] * float(wanted) else found  # a NaN stays one


def pairs_of_all(own: Pairs | None, precision: torch.dtype = torch.float64) -> Pairs | None:
    """The sums of all processes, from those that each of them has; None where none has any."""
    widths = [
        part for part in distributed.all_gather(None if own is None else (own.z.shape[1], own.y.shape[1])) if part
    ]
    if not widths:
        return None
    pairs = Pairs.blank(*widths[0], precision) if own is None else own
    distributed.all_reduce(pairs.counts, pairs.z, pairs.y, pairs.zz, pairs.zy, pairs.yy)
    return pairs


def best_map(
    weight: torch.Tensor, bias: torch.Tensor | None, pairs: Pairs, ridges: tuple[float, ...] = RIDGES
) -> tuple[torch.Tensor, torch.Tensor | None, float, float]:
    """The map [out x in] and bias that come nearest, and the errors of the old map and of the new one on all the data.

    The old map comes back where nothing is better, as the precision of the weights rounds it.
    """
    before = pairs.error(weight, bias)
    if before == 0.0:  # what would be solved for is noise
        return weight, bias, before, before
    ridge = _best_ridge(weight, bias, pairs, ridges)
    found = _solve(weight, bias, pairs, ridge)
    if found is not None:
        new = found[0].to(weight.dtype)
        shift = None if bias is None or found[1] is None else found[1].to(bias.dtype)
        after = pairs.error(new, shift)
        if after <= before:  # False for NaN as well
            return new, shift, before, after
    return weight, bias, before, before


def _best_ridge(weight: torch.Tensor, bias: torch.Tensor | None, pairs: Pairs, ridges: tuple[float, ...]) -> float:
    """The ridge that does best on the fold that is left out; the largest where a fold is empty."""
    if len(ridges) == 1:
        return ridges[0]
    if bool((pairs.counts == 0).any()):
        return max(ridges)
    errors = dict.fromkeys(sorted(ridges, reverse=True), 0.0)  # of equal ones the largest
    for fold in range(FOLDS):
        fitted, unseen = pairs.only(1 - fold), pairs.only(fold)
        for ridge in errors:
            found = _solve(weight, bias, fitted, ridge)
            own = torch.inf if found is None else unseen.error(*found)
            errors[ridge] += own * float(unseen.counts.sum())
    return min(errors, key=lambda ridge: errors[ridge])


def _solve(
    weight: torch.Tensor, bias: torch.Tensor | None, pairs: Pairs, ridge: float
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The minimum of E |y - W z - b|^2 + ridge |W - W_old|^2, about the means where there is a bias."""
    _, z, y, zz, zy = pairs.means()
    if bias is not None:
        zz.addr_(z, z, alpha=-1)
        zy.addr_(z, y, alpha=-1)
    old = weight.to(zz)
    scale = zz.diagonal().mean()
    if not scale > 0:
        return None
    left_over = zy.addmm_(zz, old.t(), alpha=-1)  # [in x out]: what the old map misses
    zz.diagonal().add_(ridge * scale)
    factor, failed = _factorised(zz)
    if failed:
        return None
    new = torch.cholesky_solve(left_over, factor).t().add_(old)
    return new, None if bias is None else y - new @ z


def _factorised(matrix: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The Cholesky factor of a symmetric matrix, in its place, and whether there is none."""
    columns = matrix.t()  # the same numbers in the order that LAPACK wants, so that nothing is copied
    failed = torch.zeros((), dtype=torch.int32)
    torch.linalg.cholesky_ex(columns, out=(columns, failed))
    return columns, bool(failed)
