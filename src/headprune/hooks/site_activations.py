"""Callbacks with the activations at sites within a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from headprune.hooks.attach import AnySite, hooks


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter requires a gradient within a block, so that backward passes compute gradients of activations
    only."""
    # By name, since an offloaded model has other parameters after each run.
    trainable = [
        (module, name)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    for module, name in trainable:
        getattr(module, name).requires_grad_(False)
    try:
        yield
    finally:
        for module, name in trainable:
            getattr(module, name).requires_grad_(True)


@contextmanager
def site_callbacks(
    model: nn.Module,
    sites: Sequence[AnySite],
    *,
    projection: Callable[[AnySite, str, torch.Tensor, torch.Tensor], None] | None = None,
    output: Callable[[AnySite, torch.Tensor], None] | None = None,
) -> Iterator[None]:
    """Call back with the activations at each site, application after application.

    `projection(site, path, inputs, outputs)` sees every q, k and v projection of attention and every map in
    front of neurons, a fused one once;
    `output(site, columns)` sees the inputs of the output map of a site, member after member. With gradients enabled
    both see tensors that require a gradient, so that a backward pass reaches every site although all parameters are
    frozen.
    """
    after, before = [], []
    for site in sites:
        if projection is not None and site.kept:
            after += [
                (model.get_submodule(path), _projection_hook(site, path, projection)) for path in site.producing_maps
            ]
        if output is not None and site.kept:
            before.append((model.get_submodule(site.o), _output_hook(site, output)))
    with hooks(after), hooks(before, before=True):
        yield


def tracked_output(output: torch.Tensor) -> torch.Tensor:
    """The output of a module, for its hook to return: with gradients enabled, one that requires a gradient. It is no
    leaf, since the code of a model may add to it in place."""
    if not torch.is_grad_enabled() or output.requires_grad:
        return output
    return output.detach().requires_grad_(True).clone()


def _projection_hook(site: AnySite, path: str, callback: Callable[..., None]) -> Callable[..., torch.Tensor]:
    def watch(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        output = tracked_output(output)
        callback(site, path, args[0], output)
        return output

    return watch


def _output_hook(site: AnySite, callback: Callable[..., None]) -> Callable[..., None]:
    def watch(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled() and not args[0].requires_grad:
            args[0].requires_grad_(True)
        callback(site, args[0])

    return watch
