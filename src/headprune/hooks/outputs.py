"""Runs a model on a batch, and compares outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from headprune.batches import to_device
from headprune.hooks.attach import hooks
from headprune.hooks.offload import input_device
from headprune.hooks.torch_attention import exposing

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# Outputs that are not compared: those that depend on labels, KV caches and attention maps.
NOT_COMPARED = ("loss", "past_key_values", "attentions", "decoder_attentions", "cross_attentions", "encoder_attentions")
# Allowed difference of outputs relative to their largest value, by precision.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, and ready for hooks, within a block; then each as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    norms = [(module, _contiguous_gradient) for module in model.modules() if isinstance(module, BATCH_NORMS)]
    try:
        with exposing(model), hooks(norms):
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _contiguous_gradient(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    """For one sample, torch's backward of batch norm in eval mode is wrong on the CPU where the gradient at its output
    is a permuted tensor, as in CvT: the layouts of both are taken to be the same."""
    if output.requires_grad:
        output.register_hook(torch.Tensor.contiguous)


def run(model: nn.Module, batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """The floating-point outputs of the model in eval mode, without gradients."""
    device = input_device(model)
    with torch.no_grad(), evaluating(model):
        return compared_outputs(model(**to_device(batch, device)))


def compared_outputs(output: Any) -> list[torch.Tensor]:
    """The floating-point outputs that are compared."""
    named = output.items() if isinstance(output, Mapping) else enumerate(output)
    return [
        value
        for name, value in named
        if name not in NOT_COMPARED and isinstance(value, torch.Tensor) and value.is_floating_point()
    ]


def largest_difference(expected: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]) -> tuple[float, float]:
    """The largest absolute difference (NaN if there is one in either), and the largest that rounding may cause."""
    worst, allowed = 0.0, 0.0
    for one, other in zip(expected, actual, strict=True):
        if one.numel():
            difference = (one.double() - other.double()).abs().max().item()
            worst = difference if not difference <= worst else worst
            scale = max(1.0, one.double().abs().max().item())
            allowed = max(allowed, scale * TOLERANCE.get(one.dtype, 1e-4))
    return worst, allowed
