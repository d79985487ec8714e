"""What moves what: which entries of an attention module's tensors change which columns of its output map's input.

The module is run once with gradients, and one backward pass per column tells everything that column depends on. An
entry that a column does not depend on has no gradient there whatever the values are, so on random weights the pattern
of the zeros is the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headprune.hooks.attach import hooks
from headprune.hooks.recorded_calls import Call, copied, first_tensor

# Relative to the largest gradient of the same tensor. What depends on nothing has a gradient of rounding at most.
NOISE = {torch.float64: 1e-9, torch.float32: 1e-6}


class NotReadableError(Exception):
    """The experiment could not be made, or says that heads cannot be told apart; the text is the end of a sentence."""


def said(error: Exception) -> str:
    """What some code raised, as a part of a sentence."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


@dataclass
class Influence:
    """Bool tables of what moves what, for the columns of one output map's input."""

    columns: int
    axes: dict[str, list[torch.Tensor]]  # tensor -> per axis [columns x indices]; tensors by their name in the module
    arguments: dict[str, list[torch.Tensor]]  # the same for tensors that the module is given
    shapes: dict[str, tuple[int, ...]]
    elsewhere: dict[str, torch.Tensor]  # linear map -> [rows], whether other tokens than the column's own play a part


@dataclass
class Subject:
    """A module, a way to call it, and how to get the input of the output map from a run."""

    module: nn.Module
    call: Call
    output: str | None  # the output map inside the module; None where the module's own output is what it is given


def influence(subject: Subject, linears: Mapping[str, nn.Module]) -> Influence:
    """Measure it; `linears` are linear maps inside the module whose outputs are looked at, by name."""
    with torch.enable_grad(), _differentiable(subject.module):
        arguments: dict[str, torch.Tensor] = {}
        args = tuple(_tracked(value, f"{place}", arguments) for place, value in enumerate(copied(subject.call.args)))
        kwargs = {name: _tracked(value, name, arguments) for name, value in copied(subject.call.kwargs).items()}
        outputs: dict[str, list[torch.Tensor]] = {}
        with _watched(subject, linears, outputs) as seen:
            result = subject.module(*args, **kwargs)
        if subject.output is not None and not seen:
            raise NotReadableError("no linear map takes what its heads give")
        columns = seen[-1] if subject.output is not None else _joined(result)
        if columns is None or not columns.requires_grad or columns.dim() < 2:
            raise NotReadableError("what its output map is given could not be followed back to its weights")
        if len(seen) > 1:
            raise NotReadableError("its output map runs several times in one call")
        return _measured(subject.module, columns, arguments, outputs, linears)


def _joined(result: Any) -> torch.Tensor | None:
    """What a module gives: its first tensor, and with it others of the same width (LUKE's words and entities)."""
    first = first_tensor(result)
    if first is None or not isinstance(result, (tuple, list)):
        return first
    alike = [
        part
        for part in result
        if isinstance(part, torch.Tensor) and part.dim() == first.dim() and part.requires_grad
        if part.shape[0] == first.shape[0] and part.shape[2:] == first.shape[2:]
    ]
    return torch.cat(alike, dim=1) if len(alike) > 1 else first


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
    """Buffers that may have a head axis; what a batch norm has counted is not one that can be differentiated."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, child in module.named_modules()
        if not isinstance(child, nn.modules.batchnorm._NormBase)
        for name, buffer in child.named_buffers(recurse=False)
        if buffer.is_floating_point()
    }


def _tracked(value: Any, name: str, into: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1:
        into[name] = value.requires_grad_(True)
    return value


@contextmanager
def _watched(
    subject: Subject, linears: Mapping[str, nn.Module], outputs: dict[str, list[torch.Tensor]]
) -> Iterator[list[torch.Tensor]]:
    seen: list[torch.Tensor] = []
    targets = [] if subject.output is None else [subject.module.get_submodule(subject.output)]
    with (
        hooks([(linear, _keeping(outputs, name)) for name, linear in linears.items()]),
        hooks([(target, lambda m, args: seen.append(args[0])) for target in targets], before=True),
    ):
        yield seen


def _keeping(outputs: dict[str, list[torch.Tensor]], name: str) -> Callable[..., None]:
    return lambda module, args, output: outputs.setdefault(name, []).append(output)


def _measured(
    module: nn.Module,
    columns: torch.Tensor,
    arguments: Mapping[str, torch.Tensor],
    outputs: Mapping[str, list[torch.Tensor]],
    linears: Mapping[str, nn.Module],
) -> Influence:
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {name: tensor for name, tensor in named.items() if tensor.requires_grad and tensor.dim()}
    everything = [*tensors.items(), *((f"argument {name}", tensor) for name, tensor in arguments.items())]
    flat = columns.reshape(-1, columns.shape[-1])
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(len(flat), generator=generator).to(flat) + 0.5
    noise = NOISE.get(columns.dtype, 1e-6)
    last = len(flat) // 2 - 1  # the last token of the first of two samples, which sees all before it
    places = dict.fromkeys((last, max(last // 2, 0)))  # or one before it, where the last is padding
    found_elsewhere = (_elsewhere(flat, place, outputs, arguments, noise) for place in places)
    elsewhere = next((rows for rows, mixes in found_elsewhere if mixes), None)
    if elsewhere is None:
        raise NotReadableError("it does not mix tokens")
    tables = {name: [torch.zeros(flat.shape[1], size) for size in tensor.shape] for name, tensor in everything}
    for column in range(flat.shape[1]):
        target = (flat[:, column] * weights).sum()
        gradients = torch.autograd.grad(
            target, [tensor for _, tensor in everything], retain_graph=True, allow_unused=True
        )
        for (name, _), gradient in zip(everything, gradients, strict=True):
            if gradient is not None:
                size = gradient.abs()
                for axis, table in enumerate(tables[name]):
                    table[column] = size.movedim(axis, 0).reshape(len(table[column]), -1).amax(1)
    found = {
        name: [table > noise * max(float(table.max()), 1e-30) for table in parts] for name, parts in tables.items()
    }
    # What other inputs would reach may have heads as well, which nobody saw (Longformer's maps for global attention).
    for name in linears:
        if name not in outputs and not any(bool(table.any()) for table in found.get(f"{name}.weight", [])):
            raise NotReadableError(f"its map {name} did not run on the inputs that were tried")
    return Influence(
        columns=flat.shape[1],
        axes={name: found[name] for name in tensors},
        arguments={name: found[f"argument {name}"] for name in arguments},
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
        elsewhere=elsewhere,
    )


def _elsewhere(
    flat: torch.Tensor,
    place: int,
    outputs: Mapping[str, list[torch.Tensor]],
    arguments: Mapping[str, torch.Tensor],
    noise: float,
) -> tuple[dict[str, torch.Tensor], bool]:
    """Per row of each linear map, whether the columns of the token at this place depend on what the map gave for
    other tokens."""
    single = {name: parts[0] for name, parts in outputs.items() if len(parts) == 1 and parts[0].requires_grad}
    wanted = {**single, **{f"argument {name}": tensor for name, tensor in arguments.items()}}
    tables = {name: torch.zeros(tensor.shape[-1]) for name, tensor in single.items()}
    mixes = False
    for column in range(flat.shape[1]):
        gradients = torch.autograd.grad(
            flat[place, column], list(wanted.values()), retain_graph=True, allow_unused=True
        )
        for (name, tensor), gradient in zip(wanted.items(), gradients, strict=True):
            if gradient is None or tensor.dim() < 2:
                continue
            size = gradient.abs().reshape(-1, tensor.shape[-1])
            others = size.clone()
            if len(size) == len(flat):
                others[place] = 0
                mixes |= bool((others > noise * size.max().clamp_min(1e-30)).any())
            else:  # keys of another sequence
                mixes |= int((size.amax(1) > noise * size.max().clamp_min(1e-30)).sum()) > 1
            if name in single:
                share = others.amax(0) / size.max().clamp_min(1e-30)
                tables[name] = torch.maximum(tables[name], share.to(tables[name]))
    return {name: table > noise for name, table in tables.items()}, mixes
