"""The regression behind every repair: the residual of an output map, explained by its inputs, from sums over tokens.

A site with the target y has the output W z + b for inputs z, and the residual r = y - W z - b. The change D of the map
and d of the bias minimise E |r - D z - d|^2, which depends on sums of z and r alone. A ridge term keeps D near 0, with
the strength that is best on held-out samples. There are no gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headprune import distributed
from headprune.signals.moments import FOLDS, Moments

RepairKind = Literal["lstsq", "mean", "none", "dense", "scale"]
LEAST_SQUARES = ("lstsq", "dense")
BUDGETS_ONLY = ("dense", "scale")  # towards the dense model, front to back through all sites
# Ridge terms to choose from, relative to the mean square of the inputs. A site's own outputs can be fitted to any
# precision; those of the dense model cannot, since the inputs differ.
SITE_RIDGES = tuple(10.0**power for power in range(-10, 2))
DENSE_RIDGES = (1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1000.0)
FEW_RIDGES = (1e-3, 1e-2, 0.1, 1.0)  # at wide sites, where each factorisation is expensive
# Errors up to this part of the mean square of the targets are rounding: models compute in float32, whose rounding
# squared is 1e-14 per term of a sum, and no useful unit causes an error as small as this. Sums in float32 round more.
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-6}
SCALE_RIDGE = 1e-3  # towards a scale of 1, relative to the mean of the diagonal
LARGEST_SCALE = 10.0  # a larger scale means that the system has no solution, and the weights stay

log = logging.getLogger(__name__)

Change = tuple[torch.Tensor, torch.Tensor | None]  # D [out x in] of a map, and d [out] of its bias if it has one


@dataclass(frozen=True)
class Repair:
    """The repair of one site after the removal of units, and its effect on the site's output.

    Errors are mean squared differences from the target over the calibration tokens, without and with the repair.
    """

    site: int
    kind: RepairKind
    error_without: float | None  # both None where nothing could be measured
    error: float | None
    weight: torch.Tensor | None = None  # [out x kept columns]: the new output projection
    bias: torch.Tensor | None = None

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("site", "kind", "error_without", "error")}


@dataclass
class Sums:
    """Sums over tokens of inputs z, about a point `z_shift`, and of residuals r, about `r_shift`. The first axis is the
    fold that a token's sample belongs to."""

    z_shift: torch.Tensor  # [in]
    r_shift: torch.Tensor  # [out]
    counts: torch.Tensor  # [folds], of tokens or of their weights
    z: torch.Tensor  # [folds x in]
    r: torch.Tensor  # [folds x out]
    zz: torch.Tensor  # [folds x in x in]
    zr: torch.Tensor  # [folds x in x out]
    rr: torch.Tensor  # [folds], sums of squares
    yy: torch.Tensor  # [folds], sums of squares of the targets, for the limit of rounding

    @classmethod
    def blank(cls, inputs: int, outputs: int, precision: torch.dtype = torch.float64) -> Sums:
        shapes = ((inputs,), (outputs,), (FOLDS,), (FOLDS, inputs), (FOLDS, outputs))
        larger = ((FOLDS, inputs, inputs), (FOLDS, inputs, outputs), (FOLDS,), (FOLDS,))
        return cls(*(torch.zeros(shape, dtype=precision) for shape in (*shapes, *larger)))

    @classmethod
    def of_removal(cls, weight: torch.Tensor, removed: torch.Tensor, moments: Moments) -> Sums:
        """For a map [out x in] that loses the `removed` columns, with its outputs before that as targets."""
        lost = weight[:, removed].to(moments.total)
        crossed = moments.products[:, ~removed][:, :, removed]
        inner = moments.products[:, removed][:, :, removed]
        counts = moments.counts.to(moments.total)
        return cls(
            moments.shift[~removed],
            lost @ moments.shift[removed],
            counts,
            moments.total[:, ~removed],
            moments.total[:, removed] @ lost.t(),
            moments.products[:, ~removed][:, :, ~removed],
            crossed @ lost.t(),
            ((lost @ inner) * lost).sum((1, 2)),
            torch.zeros_like(counts),
        )

    def add(
        self,
        z: torch.Tensor,
        y: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        folds: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> None:
        """Add tokens [tokens x in] with targets y [tokens x out], of samples in these folds, each with its weight.
        Shifts must be zero."""
        for fold in range(FOLDS):
            in_fold = folds == fold
            inputs, outputs = z[in_fold].to(self.zz).cpu(), y[in_fold].to(self.zz)
            share = self.zz.new_ones(len(inputs)) if weights is None else weights[in_fold].to(self.zz)
            residual = outputs - inputs @ weight.to(inputs).t()
            residual = residual if bias is None else residual - bias.to(inputs)
            weighted = inputs * share[:, None]
            self.counts[fold] += share.sum()
            self.z[fold] += weighted.sum(0)
            self.r[fold] += (residual * share[:, None]).sum(0)
            self.zz[fold].addmm_(weighted.t(), inputs)  # in place: a gigabyte for a wide layer
            self.zr[fold].addmm_(weighted.t(), residual)
            self.rr[fold] += (residual.square().sum(1) * share).sum()
            self.yy[fold] += (outputs.square().sum(1) * share).sum()

    @property
    def count(self) -> torch.Tensor:
        return self.counts.sum().clamp_min(torch.finfo(self.counts.dtype).tiny)

    @property
    def mean_z(self) -> torch.Tensor:
        return self.z.sum(0) / self.count + self.z_shift

    @property
    def mean_r(self) -> torch.Tensor:
        return self.r.sum(0) / self.count + self.r_shift

    def only(self, fold: int) -> Sums:
        part = slice(fold, fold + 1)
        sums = (self.counts, self.z, self.r, self.zz, self.zr, self.rr, self.yy)
        return Sums(self.z_shift, self.r_shift, *(sums[part] for sums in sums))

    def products(self, *, centred: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """E[z z^T] and E[z r^T], about the means or about zero, as new tensors."""
        zz, zr = (part.sum(0).div_(self.count) for part in (self.zz, self.zr))
        z, r = self.z.sum(0) / self.count, self.r.sum(0) / self.count
        zz.addr_(z, z, alpha=-1)
        zr.addr_(z, r, alpha=-1)
        if not centred:
            z, r = z + self.z_shift, r + self.r_shift
            zz.addr_(z, z)
            zr.addr_(z, r)
        return zz, zr

    def error(self, change: torch.Tensor | None = None, shift: torch.Tensor | None = None) -> float:
        """E |r - D z - d|^2, and 0 where that is no more than the rounding of the targets."""
        z, r = self.z.sum(0) / self.count, self.r.sum(0) / self.count
        total = self.rr.sum() / self.count
        off = -self.r_shift if shift is None else shift.to(r) - self.r_shift
        if change is not None:
            change = change.to(r)
            off = off + change @ self.z_shift
            # Fold by fold, since a sum over folds would be another large tensor.
            total = total + sum(((change @ zz) * change).sum() for zz in self.zz) / self.count
            total = total - 2 * sum((change.t() * zr).sum() for zr in self.zr) / self.count
            r = r - change @ z
        error = float(total + off.square().sum() - 2 * off @ r)
        limit = ROUNDING[self.zz.dtype] * float(self.yy.sum() / self.count)
        return 0.0 if error <= limit else error  # a NaN stays one


def sums_of_all(local: Sums | None, precision: torch.dtype = torch.float64) -> Sums | None:
    """The sums over all processes; None where no process has any."""
    widths = [part for part in distributed.all_gather(local and (local.z.shape[1], local.r.shape[1])) if part]
    if not widths:
        return None
    sums = Sums.blank(*widths[0], precision) if local is None else local
    distributed.all_reduce(sums.counts, sums.z, sums.r, sums.zz, sums.zr, sums.rr, sums.yy)
    return sums


def fit(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    sums: Sums,
    repair: RepairKind,
    *,
    ridges: tuple[float, ...] = SITE_RIDGES,
    units: torch.Tensor | None = None,
    site: int = 0,
) -> Repair:
    """The repair of an output map `weight` [out x in] with these sums; `units` [in] is the unit of each column, for
    scales.

    The result, rounded to the precision of the weights, never has a larger error on the sums than the map before:
    the fallback of least squares is the mean, and that of the mean no repair.
    """
    without = sums.error()
    candidates: dict[RepairKind, Callable[[], Change | None]] = {}
    if repair in LEAST_SQUARES and weight.shape[1]:
        candidates[repair] = lambda: least_squares(sums, ridges, centred=bias is not None)
    if repair == "scale" and weight.shape[1]:
        candidates[repair] = lambda: best_scales(weight, units, sums)
    if repair in (*LEAST_SQUARES, "mean") and bias is not None:
        candidates["mean"] = lambda: (weight.new_zeros(weight.shape), sums.mean_r)
    for kind, solve in candidates.items():
        if without == 0.0:  # only rounding
            return Repair(site, kind, without, without, weight, bias)
        change = solve()
        if change is None:
            log.warning("%s has no solution at site %d, so it is not used.", kind, site)
            continue
        new = (weight.to(change[0]) + change[0]).to(weight.dtype)
        shift = None if bias is None or change[1] is None else (bias.to(change[1]) + change[1]).to(bias.dtype)
        moved = None if bias is None or shift is None else shift.to(sums.zz) - bias.to(sums.zz)
        error = sums.error(new.to(sums.zz) - weight.to(sums.zz), moved)
        if error <= without:  # False for NaN as well
            return Repair(site, kind, without, error, new, shift)
        log.warning(
            "%s would make site %d worse (%.3g instead of %.3g), so it is not used.", kind, site, error, without
        )
    return Repair(site, "none", without, without)


def least_squares(sums: Sums, ridges: tuple[float, ...], *, centred: bool) -> Change | None:
    """The change of the map, and of the bias if `centred`, with the ridge that is best on held-out samples: small
    where the inputs explain the residual, large where there is little data."""
    return _solve(sums, best_ridge(sums, ridges, centred=centred), centred=centred)


def best_ridge(sums: Sums, ridges: tuple[float, ...], *, centred: bool) -> float:
    """The ridge with the least error on the held-out fold, the largest where a fold is empty. Tokens of one sample are
    similar, so whole samples are held out."""
    if len(ridges) == 1:
        return ridges[0]
    if bool((sums.counts == 0).any()):
        return max(ridges)
    errors = dict.fromkeys(sorted(ridges, reverse=True), 0.0)  # of equal ones the largest
    for fold in range(FOLDS):
        fitted, held_out = sums.only(1 - fold), sums.only(fold)
        for ridge in errors:
            change = _solve(fitted, ridge, centred=centred)
            errors[ridge] += (torch.inf if change is None else held_out.error(*change)) * float(held_out.count)
    return min(errors, key=lambda ridge: errors[ridge])


def _solve(sums: Sums, ridge: float, *, centred: bool) -> Change | None:
    """The minimum of E |r - D z - d|^2 + ridge |D|^2, about the means where there is a bias; None where it has none."""
    zz, zr = sums.products(centred=centred)
    scale = zz.diagonal().mean()
    if not scale > 0:
        change = torch.zeros_like(zr).t()
    else:
        zz.diagonal().add_(ridge * scale)
        factor, failed = _factorised(zz)
        if failed:
            return None
        change = torch.cholesky_solve(zr, factor).t()
    return change, sums.mean_r - change @ sums.mean_z if centred else None


def _factorised(matrix: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The Cholesky factor of a symmetric matrix, computed in place, and whether it failed."""
    columns = matrix.t()  # column-major as LAPACK needs it, so that nothing is copied
    failed = torch.zeros((), dtype=torch.int32)
    torch.linalg.cholesky_ex(columns, out=(columns, failed))
    return columns, bool(failed)


def best_scales(weight: torch.Tensor, units: torch.Tensor | None, sums: Sums) -> Change | None:
    """One scale per unit, as in Kwon et al. 2022.

    The output of a site is sum_u a_u W_u z_u + b over its units. With W^T W and E[z z^T] multiplied entry by entry, and
    added up over the columns of units, the scales a are a linear system with one unknown per unit.
    """
    assert units is not None
    zz, zr = sums.products(centred=False)
    weight = weight.to(zz)
    size = int(units.max()) + 1
    products = zz.new_zeros(size, len(units)).index_add_(0, units, (weight.t() @ weight) * zz)
    system = zz.new_zeros(size, size).index_add_(1, units, products)
    target = zz.new_zeros(size).index_add_(0, units, (weight.t() * zr).sum(1))
    system.diagonal().add_(SCALE_RIDGE * system.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(system)
    if int(failed):
        return None
    change = torch.cholesky_solve(target[:, None], factor)[:, 0]
    return (weight * change[units], None) if bool(((1 + change).abs() <= LARGEST_SCALE).all()) else None
