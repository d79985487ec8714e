"""The regression behind every repair, without a model: what an output map misses, expressed by what it is given.

A site is to give y, and its output map W, b makes W z + b of what it is given. It misses r = y - W z - b. The change D
of the map and d of the bias that make up for most of it minimise E |r - D z - d|^2, which the sums of z and r decide; a
ridge term holds D near 0, as strongly as serves samples that it was not fitted to. There is no gradient in it.
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
BUDGETS_ONLY = ("dense", "scale")  # aim at the dense model, front to back through all sites, as only budgets do
# Ridge terms to choose from, relative to the mean square of the inputs. What a site gave itself can be expressed to any
# precision; what a dense model gives there cannot, with inputs that are others already.
SITE_RIDGES = tuple(10.0**power for power in range(-10, 2))
DENSE_RIDGES = (1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1000.0)
FEW_RIDGES = (1e-3, 1e-2, 0.1, 1.0)  # at wide sites, where each costs a factorisation of its own
# Of the mean square of the wanted outputs: models compute them in float32, whose rounding squared is 1e-14 per term of
# a sum, and no unit that does anything is missed by as little as this. Sums in float32 round by more themselves.
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-6}
SCALE_RIDGE = 1e-3  # towards a scale of 1, relative to the mean of the diagonal
LARGEST_SCALE = 10.0  # beyond that a scale is a sign of a system without a solution, and the weights stay

log = logging.getLogger(__name__)

Change = tuple[torch.Tensor, torch.Tensor | None]  # D [out x in] of a map, and d [out] of its bias if it has one


@dataclass(frozen=True)
class Repair:
    """What is done at one site for the units that went, and what that does to the site's output.

    Errors are mean squared differences from the wanted output over the calibration tokens, without and with the repair.
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
    """Sums over tokens of inputs z, about a point `z_shift`, and of what the map misses r, about `r_shift`. The first
    axis is the fold that a token's sample belongs to."""

    z_shift: torch.Tensor  # [in]
    r_shift: torch.Tensor  # [out]
    counts: torch.Tensor  # [folds], of tokens or of their weights
    z: torch.Tensor  # [folds x in]
    r: torch.Tensor  # [folds x out]
    zz: torch.Tensor  # [folds x in x in]
    zr: torch.Tensor  # [folds x in x out]
    rr: torch.Tensor  # [folds], sums of squares
    yy: torch.Tensor  # [folds], sums of squares of the wanted outputs, where rounding hides what is missed

    @classmethod
    def blank(cls, inputs: int, outputs: int, precision: torch.dtype = torch.float64) -> Sums:
        shapes = ((inputs,), (outputs,), (FOLDS,), (FOLDS, inputs), (FOLDS, outputs))
        larger = ((FOLDS, inputs, inputs), (FOLDS, inputs, outputs), (FOLDS,), (FOLDS,))
        return cls(*(torch.zeros(shape, dtype=precision) for shape in (*shapes, *larger)))

    @classmethod
    def of_removal(cls, weight: torch.Tensor, removed: torch.Tensor, moments: Moments) -> Sums:
        """For a map [out x in] that loses the `removed` columns, and is to give what it gave before."""
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
        """Take in tokens [tokens x in] for which a map should give y [tokens x out], of samples in these folds, each
        with its weight; not after shifts."""
        for fold in range(FOLDS):
            mine = folds == fold
            inputs, outputs = z[mine].to(self.zz).cpu(), y[mine].to(self.zz)
            share = self.zz.new_ones(len(inputs)) if weights is None else weights[mine].to(self.zz)
            missed = outputs - inputs @ weight.to(inputs).t()
            missed = missed if bias is None else missed - bias.to(inputs)
            weighted = inputs * share[:, None]
            self.counts[fold] += share.sum()
            self.z[fold] += weighted.sum(0)
            self.r[fold] += (missed * share[:, None]).sum(0)
            self.zz[fold].addmm_(weighted.t(), inputs)  # in place: of a wide layer it is a gigabyte
            self.zr[fold].addmm_(weighted.t(), missed)
            self.rr[fold] += (missed.square().sum(1) * share).sum()
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
        return Sums(self.z_shift, self.r_shift, *(own[part] for own in sums))

    def products(self, *, centred: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """E[z z^T] and E[z r^T], about the means or about zero, as tensors of their own."""
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
        """E |r - D z - d|^2, and 0 where that is no more than the rounding of the wanted outputs."""
        z, r = self.z.sum(0) / self.count, self.r.sum(0) / self.count
        total = self.rr.sum() / self.count
        off = -self.r_shift if shift is None else shift.to(r) - self.r_shift
        if change is not None:
            change = change.to(r)
            off = off + change @ self.z_shift
            # Fold by fold, since a sum of both would be as large as they are.
            total = total + sum(((change @ zz) * change).sum() for zz in self.zz) / self.count
            total = total - 2 * sum((change.t() * zr).sum() for zr in self.zr) / self.count
            r = r - change @ z
        found = float(total + off.square().sum() - 2 * off @ r)
        limit = ROUNDING[self.zz.dtype] * float(self.yy.sum() / self.count)
        return 0.0 if found <= limit else found  # a NaN stays one


def sums_of_all(own: Sums | None, precision: torch.dtype = torch.float64) -> Sums | None:
    """The sums of all processes, from those that each of them has; None where none has any."""
    widths = [part for part in distributed.all_gather(own and (own.z.shape[1], own.r.shape[1])) if part]
    if not widths:
        return None
    sums = Sums.blank(*widths[0], precision) if own is None else own
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
    """The new output map for a site that misses what the sums say with `weight` [out x in]; `units` [in] says which
    unit a column belongs to, for scales.

    What comes back is never worse on the sums than the map that is there, as the precision of the weights rounds it:
    least squares gives way to the mean, and the mean to nothing.
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
        if without == 0.0:  # what would be solved for is noise
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
    """The change of the map, and of the bias if `centred`, with the ridge that does best on samples it was not fitted
    to: next to none where the inputs can express what is missed, a large one where there is little to learn from."""
    return _solve(sums, best_ridge(sums, ridges, centred=centred), centred=centred)


def best_ridge(sums: Sums, ridges: tuple[float, ...], *, centred: bool) -> float:
    """The ridge with the least error on the fold that is left out, the largest where a fold is empty. Tokens of one
    sample are alike, so whole samples are left out."""
    if len(ridges) == 1:
        return ridges[0]
    if bool((sums.counts == 0).any()):
        return max(ridges)
    errors = dict.fromkeys(sorted(ridges, reverse=True), 0.0)  # of equal ones the largest
    for fold in range(FOLDS):
        fitted, unseen = sums.only(1 - fold), sums.only(fold)
        for ridge in errors:
            change = _solve(fitted, ridge, centred=centred)
            errors[ridge] += (torch.inf if change is None else unseen.error(*change)) * float(unseen.count)
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
    """The Cholesky factor of a symmetric matrix, in its place, and whether there is none."""
    columns = matrix.t()  # the same numbers in the order that LAPACK wants, so that nothing is copied
    failed = torch.zeros((), dtype=torch.int32)
    torch.linalg.cholesky_ex(columns, out=(columns, failed))
    return columns, bool(failed)


def best_scales(weight: torch.Tensor, units: torch.Tensor | None, sums: Sums) -> Change | None:
    """One scale per unit, as in Kwon et al. 2022.

    What a site gives is sum_u a_u W_u z_u + b over its units. With W^T W and E[z z^T] multiplied entry by entry, and
    added up over the columns of units, the scales a are a linear system with one unknown per unit.
    """
    assert units is not None
    zz, zr = sums.products(centred=False)
    weight = weight.to(zz)
    size = int(units.max()) + 1
    products = zz.new_zeros(size, len(units)).index_add_(0, units, (weight.t() @ weight) * zz)
    system = zz.new_zeros(size, size).index_add_(1, units, products)
    aim = zz.new_zeros(size).index_add_(0, units, (weight.t() * zr).sum(1))
    system.diagonal().add_(SCALE_RIDGE * system.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(system)
    if int(failed):
        return None
    more = torch.cholesky_solve(aim[:, None], factor)[:, 0]
    return (weight * more[units], None) if bool(((1 + more).abs() <= LARGEST_SCALE).all()) else None
