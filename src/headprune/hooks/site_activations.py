"""Callbacks with the activations at sites within a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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


@contextmanager
def captured_outputs(modules: Sequence[tuple[str, nn.Module]], into: dict[str, Any]) -> Iterator[None]:
    """Collect the outputs of modules by name."""

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, output: into.__setitem__(name, output)

    with hooks([(module, keep(name)) for name, module in modules]):
        yield


def _projection_hook(site: AnySite, path: str, callback: Callable[..., None]) -> Callable[..., None]:
    def watch(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        callback(site, path, args[0], _tracked(output))

    return watch


def _output_hook(site: AnySite, callback: Callable[..., None]) -> Callable[..., None]:
    def watch(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        callback(site, _tracked(args[0]))

    return watch


def _tracked(tensor: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and not tensor.requires_grad:
        tensor.requires_grad_(True)
    return tensor
