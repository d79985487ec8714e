"""One least-squares scale per unit, as in Kwon et al. 2022: the mathematics, without a model.

What a site gives is sum_u a_u W_u z_u + b over its units. The scales a that come nearest to the wanted outputs y follow
from the sums that least squares over all columns needs too: with C = W^T W and E[z z^T] multiplied entry by entry, and
added up over the columns of units, they are a linear system with one unknown per unit.
"""

from __future__ import annotations

import torch

from headprune.repair.towards import Pairs

RIDGE = 1e-3  # towards a scale of 1, relative to the mean of the diagonal
LARGEST = 10.0  # beyond that a scale is a sign of a system without a solution, and the weights stay


def best_scales(
    weight: torch.Tensor, bias: torch.Tensor | None, pairs: Pairs, units: torch.Tensor
) -> tuple[torch.Tensor, float, float]:
    """The map [out x in] with the columns of every unit scaled, and the errors of the old map and of the new one.

    `units` [in] says which unit a column belongs to. The old map comes back where nothing is better.
    """
    before = pairs.error(weight, bias)
    scales = _scales(weight.double(), bias, pairs, units)
    if scales is not None:
        new = (weight.double() * scales[units]).to(weight.dtype)
        after = pairs.error(new, bias)
        if after <= before:  # False for NaN as well
            return new, before, after
    return weight, before, before


def _scales(weight: torch.Tensor, bias: torch.Tensor | None, pairs: Pairs, units: torch.Tensor) -> torch.Tensor | None:
    count = pairs.counts.sum().clamp_min(torch.finfo(torch.float64).tiny)
    z, zz, zy = (part.sum(0) / count for part in (pairs.z, pairs.zz, pairs.zy))
    wanted = (weight.t() * zy).sum(1)
    if bias is not None:
        wanted = wanted - (weight.t() @ bias.double()) * z
    size = int(units.max()) + 1
    products = torch.zeros(size, len(units), dtype=torch.float64).index_add_(0, units, (weight.t() @ weight) * zz)
    system = torch.zeros(size, size, dtype=torch.float64).index_add_(1, units, products)
    aim = torch.zeros(size, dtype=torch.float64).index_add_(0, units, wanted)
    held = system.clone()
    held.diagonal().add_(RIDGE * system.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(held)
    if int(failed):
        return None
    scales = 1 + torch.cholesky_solve((aim - system.sum(1))[:, None], factor)[:, 0]
    return scales if bool((scales.abs() <= LARGEST).all()) else None
