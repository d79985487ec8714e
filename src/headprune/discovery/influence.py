"""Measures which entries of an attention module's tensors influence which columns of its output map's input.

The module runs once with gradients, and one backward pass per column shows everything that the column depends on. The
gradient of an entry on which a column does not depend is zero whatever the values are, so on random weights the pattern
of zeros is the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headprune.hooks.attach import hooks
from headprune.hooks.module_calls import ModuleCall, detached_copy, first_tensor

# Relative to the largest gradient of the same tensor: gradients below are rounding errors.
NOISE = {torch.float64: 1e-9, torch.float32: 1e-6}


class NotReadableError(Exception):
    """The layout could not be measured, or heads cannot be separated; the message is the end of a sentence."""


def describe_error(error: Exception) -> str:
    """An exception as a part of a sentence."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


@dataclass
class Influence:
    """Bool tables of the entries that influence each column of the input of an output map."""

    columns: int
    axes: dict[str, list[torch.Tensor]]  # tensor -> per axis [columns x indices]; tensors by their name in the module
    arguments: dict[str, list[torch.Tensor]]  # the same for arguments of the forward
    shapes: dict[str, tuple[int, ...]]
    cross_token: dict[str, torch.Tensor]  # linear map -> [rows], whether a row at other tokens influences a column


@dataclass
class RecordedModule:
    """A module, the arguments to call it with, and its output map."""

    module: nn.Module
    call: ModuleCall
    output: str | None  # the output map inside the module; None where the output of the module is the input of the map


def influence(recorded: RecordedModule, linears: Mapping[str, nn.Module]) -> Influence:
    """Measure a module; `linears` are the linear maps inside it by name, without the output map."""
    with torch.enable_grad(), _differentiable(recorded.module):
        arguments: dict[str, torch.Tensor] = {}
        args = tuple(
            _track(value, f"{position}", arguments) for position, value in enumerate(detached_copy(recorded.call.args))
        )
        kwargs = {name: _track(value, name, arguments) for name, value in detached_copy(recorded.call.kwargs).items()}
        outputs: dict[str, list[torch.Tensor]] = {}
        with _record(recorded, linears, outputs) as inputs:
            result = recorded.module(*args, **kwargs)
        if recorded.output is not None and not inputs:
            raise NotReadableError("no linear map takes what its heads give")
        columns = inputs[-1] if recorded.output is not None else _joined_output(result)
        if columns is None or not columns.requires_grad or columns.dim() < 2:
            raise NotReadableError("the input of its output map does not depend on its weights")
        if len(inputs) > 1:
            raise NotReadableError("its output map runs several times in one call")
        return _measure(recorded.module, columns, arguments, outputs, linears)


def _joined_output(result: Any) -> torch.Tensor | None:
    """The first tensor of an output, joined with others of the same width (LUKE returns words and entities)."""
    first = first_tensor(result)
    if first is None or not isinstance(result, (tuple, list)):
        return first
    parts = [
        part
        for part in result
        if isinstance(part, torch.Tensor) and part.dim() == first.dim() and part.requires_grad
        if part.shape[0] == first.shape[0] and part.shape[2:] == first.shape[2:]
    ]
    return torch.cat(parts, dim=1) if len(parts) > 1 else first


@contextmanager
def _differentiable(module: nn.Module) -> Iterator[None]:
    tensors = [*module.parameters(), *_buffers(module).values()]
    before = [(tensor, tensor.requires_grad) for tensor in tensors]
    for tensor in tensors:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        for tensor, state in before:
            tensor.requires_grad_(state)


def _buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that may have a head axis; the statistics of a batch norm cannot be differentiated."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, child in module.named_modules()
        if not isinstance(child, nn.modules.batchnorm._NormBase)
        for name, buffer in child.named_buffers(recurse=False)
        if buffer.is_floating_point()
    }


def _track(value: Any, name: str, tracked: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1:
        tracked[name] = value.requires_grad_(True)
    return value


@contextmanager
def _record(
    recorded: RecordedModule, linears: Mapping[str, nn.Module], outputs: dict[str, list[torch.Tensor]]
) -> Iterator[list[torch.Tensor]]:
    inputs: list[torch.Tensor] = []
    targets = [] if recorded.output is None else [recorded.module.get_submodule(recorded.output)]
    with (
        hooks([(linear, _recorder(outputs, name)) for name, linear in linears.items()]),
        hooks([(target, lambda m, args: inputs.append(args[0])) for target in targets], before=True),
    ):
        yield inputs


def _recorder(outputs: dict[str, list[torch.Tensor]], name: str) -> Callable[..., None]:
    return lambda module, args, output: outputs.setdefault(name, []).append(output)


def _measure(
    module: nn.Module,
    columns: torch.Tensor,
    arguments: Mapping[str, torch.Tensor],
    outputs: Mapping[str, list[torch.Tensor]],
    linears: Mapping[str, nn.Module],
) -> Influence:
    named_tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {name: tensor for name, tensor in named_tensors.items() if tensor.requires_grad and tensor.dim()}
    measured = [*tensors.items(), *((f"argument {name}", tensor) for name, tensor in arguments.items())]
    flat = columns.reshape(-1, columns.shape[-1])
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(len(flat), generator=generator).to(flat) + 0.5
    noise = NOISE.get(columns.dtype, 1e-6)
    last = len(flat) // 2 - 1  # the last token of the first of two samples, which attends to all before it
    positions = dict.fromkeys((last, max(last // 2, 0)))  # or one before it, where the last is padding
    attempts = (_cross_token_rows(flat, position, outputs, arguments, noise) for position in positions)
    cross_token = next((rows for rows, mixes in attempts if mixes), None)
    if cross_token is None:
        raise NotReadableError("it does not mix tokens")
    tables = {name: [torch.zeros(flat.shape[1], size) for size in tensor.shape] for name, tensor in measured}
    for column in range(flat.shape[1]):
        target = (flat[:, column] * weights).sum()
        gradients = torch.autograd.grad(
            target, [tensor for _, tensor in measured], retain_graph=True, allow_unused=True
        )
        for (name, _), gradient in zip(measured, gradients, strict=True):
            if gradient is not None:
                size = gradient.abs()
                for axis, table in enumerate(tables[name]):
                    table[column] = size.movedim(axis, 0).reshape(len(table[column]), -1).amax(1)
    influences = {
        name: [table > noise * max(float(table.max()), 1e-30) for table in parts] for name, parts in tables.items()
    }
    # A map that these inputs do not reach may have heads as well (Longformer's maps for global attention).
    for name in linears:
        if name not in outputs and not any(bool(table.any()) for table in influences.get(f"{name}.weight", [])):
            raise NotReadableError(f"its map {name} did not run on the inputs that were tried")
    return Influence(
        columns=flat.shape[1],
        axes={name: influences[name] for name in tensors},
        arguments={name: influences[f"argument {name}"] for name in arguments},
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        cross_token=cross_token,
    )


def _cross_token_rows(
    flat: torch.Tensor,
    position: int,
    outputs: Mapping[str, list[torch.Tensor]],
    arguments: Mapping[str, torch.Tensor],
    noise: float,
) -> tuple[dict[str, torch.Tensor], bool]:
    """Per row of each linear map, whether the columns of the token at this position depend on the outputs of the map
    at other tokens; and whether they depend on other tokens at all."""
    single = {name: parts[0] for name, parts in outputs.items() if len(parts) == 1 and parts[0].requires_grad}
    targets = {**single, **{f"argument {name}": tensor for name, tensor in arguments.items()}}
    tables = {name: torch.zeros(tensor.shape[-1]) for name, tensor in single.items()}
    mixes = False
    for column in range(flat.shape[1]):
        gradients = torch.autograd.grad(
            flat[position, column], list(targets.values()), retain_graph=True, allow_unused=True
        )
        for (name, tensor), gradient in zip(targets.items(), gradients, strict=True):
            if gradient is None or tensor.dim() < 2:
                continue
            size = gradient.abs().reshape(-1, tensor.shape[-1])
            other_tokens = size.clone()
            if len(size) == len(flat):
                other_tokens[position] = 0
                mixes |= bool((other_tokens > noise * size.max().clamp_min(1e-30)).any())
            else:  # keys of another sequence
                mixes |= int((size.amax(1) > noise * size.max().clamp_min(1e-30)).sum()) > 1
            if name in single:
                share = other_tokens.amax(0) / size.max().clamp_min(1e-30)
                tables[name] = torch.maximum(tables[name], share.to(tables[name]))
    return {name: table > noise for name, table in tables.items()}, mixes
