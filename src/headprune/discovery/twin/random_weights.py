"""Random weights without zero, constant or symmetric entries."""

from __future__ import annotations

import math

import torch
from torch import nn


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Fill every floating-point parameter with normal values, scaled so that every part affects the outputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter)
                parameter.copy_(random_values(parameter, noise))


def random_values(parameter: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    flat = parameter.detach().flatten()
    constant = bool(torch.isfinite(flat[0])) and bool((flat == flat[0]).all())
    if constant and float(flat[0]) == 1.0:
        return 1 + 0.2 * noise
    if parameter.dim() < 2 or constant:
        return 0.2 * noise
    fan_in = parameter[0].numel() if parameter.dim() != 3 else parameter.shape[-1]
    return noise / math.sqrt(max(4, fan_in))
