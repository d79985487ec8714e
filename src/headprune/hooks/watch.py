"""The one owner of every hook. What is attached here is a context manager, and always comes off again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from headprune.errors import GateError
from headprune.units import AttentionSite, resolve


@contextmanager
def hooks(
    pairs: Sequence[tuple[nn.Module, Callable[..., Any]]], *, before: bool = False, first: bool = False
) -> Iterator[None]:
    """Attach one forward hook (or, `before`, forward pre-hook) per module for the length of the block.

    A `first` hook runs before those that are there already, such as the gates of an enclosing block.
    """
    with ExitStack() as stack:
        for module, hook in pairs:
            attach = module.register_forward_pre_hook if before else module.register_forward_hook
            stack.callback(attach(hook, prepend=first).remove)
        yield


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient, so that backward passes compute gradients of activations only."""
    asking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


@contextmanager
def watched(
    model: nn.Module,
    sites: Sequence[AttentionSite],
    *,
    projection: Callable[[AttentionSite, str, torch.Tensor, torch.Tensor], None] | None = None,
    output: Callable[[AttentionSite, torch.Tensor], None] | None = None,
) -> Iterator[None]:
    """Call back with what flows through each site, application after application.

    `projection(site, path, inputs, outputs)` sees every q, k and v projection, a fused one once; `output(site, heads)`
    sees the concatenated head outputs before the output projection. While gradients are recorded, both see tensors
    that require a gradient, so that a backward pass reaches every site although all parameters are frozen.
    """
    after, before = [], []
    for site in sites:
        if projection is not None and site.kept:
            paths = dict.fromkeys((site.q.module, site.k.module, site.v.module))
            after += [(model.get_submodule(path), _projection_hook(site, path, projection)) for path in paths]
        if output is not None and site.kept:
            before.append((model.get_submodule(site.o), _output_hook(site, output)))
    with hooks(after), hooks(before, before=True):
        yield


@contextmanager
def captured_outputs(modules: Sequence[tuple[str, nn.Module]], into: dict[str, Any]) -> Iterator[None]:
    """Keep what each module gives, by name."""

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, output: into.__setitem__(name, output)

    with hooks([(module, keep(name)) for name, module in modules]):
        yield


def _projection_hook(site: AttentionSite, path: str, callback: Callable[..., None]) -> Callable[..., None]:
    def watch(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        callback(site, path, args[0], _tracked(output))

    return watch


def _output_hook(site: AttentionSite, callback: Callable[..., None]) -> Callable[..., None]:
    def watch(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        callback(site, _tracked(args[0]))

    return watch


def _tracked(tensor: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled() and not tensor.requires_grad:
        tensor.requires_grad_(True)
    return tensor


@contextmanager
def gated(model: nn.Module, gates: torch.Tensor, *, sites: Sequence[AttentionSite] | None = None) -> Iterator[None]:
    """Multiply the output of every head, before the output projection, by its gate.

    `gates` is [sites x heads], or [batch x sites x heads] for a row of gates per sample, in original head ids; the
    positions of removed heads are not looked at. A gate of 1 leaves the output as it is, bit for bit.
    """
    sites = resolve(model) if sites is None else sites
    check_gates(gates, sites)
    pairs = [(model.get_submodule(site.o), _gate_hook(site, gates)) for site in sites if site.kept]
    with hooks(pairs, before=True):
        yield


def check_gates(gates: torch.Tensor, sites: Sequence[AttentionSite]) -> None:
    wanted = (len(sites), max(site.original_heads for site in sites))
    if not isinstance(gates, torch.Tensor) or not gates.is_floating_point():
        raise GateError(f"Gates must be a floating-point tensor of shape {list(wanted)}, not {_describe(gates)}.")
    if gates.dim() not in (2, 3) or tuple(gates.shape[-2:]) != wanted:
        raise GateError(
            f"Gates must have shape {list(wanted)} (sites x heads), or one such row per sample, not "
            f"{list(gates.shape)}."
        )


def _describe(value: Any) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _gate_hook(site: AttentionSite, gates: torch.Tensor) -> Callable[..., Any]:
    kept = torch.tensor(site.kept)

    def gate(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        outputs, *rest = args
        row = gates.select(-2, site.index).index_select(-1, kept.to(gates.device)).to(outputs)
        if row.dim() == 2:
            if outputs.shape[0] != row.shape[0]:
                raise GateError(
                    f"There are gates for {row.shape[0]} samples, but {site.path} sees a batch of {outputs.shape[0]}."
                )
            row = row.view(row.shape[0], *(1,) * (outputs.dim() - 2), row.shape[1])
        heads = outputs.unflatten(-1, (site.heads, site.head_dim))
        return ((heads * row.unsqueeze(-1)).flatten(-2), *rest)

    return gate
