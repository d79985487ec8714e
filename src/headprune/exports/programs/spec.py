"""The definition of a program: a part of a model that becomes one file, with named input and output tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

Form = Literal["plain", "causal", "seq2seq"]  # one pass; a decoder; an encoder and a decoder
Tensors = dict[str, torch.Tensor]
Axes = dict[int, str]  # by number: the name of an axis of any length

BATCH, SEQUENCE, TARGET, PAST, TOTAL, SOURCE = "batch", "sequence", "target", "past", "total", "source"
PAST_NAME = "past_key_values"
CACHE = {0: BATCH, 2: PAST}
CROSS = {0: BATCH, 2: SOURCE}


@dataclass(frozen=True)
class Program:
    """A module that takes and returns a dictionary of tensors. The inputs are an example of real rows."""

    name: str
    module: nn.Module
    inputs: Tensors
    axes: Mapping[str, Axes]

    def outputs(self) -> Tensors:
        with torch.no_grad():
            return self.module(dict(self.inputs))

    def row_by_row(self) -> Program:
        """The same for one row at a time: some models keep the number of rows that they were traced with."""
        inputs = {name: tensor[:1].contiguous() for name, tensor in self.inputs.items()}
        free = {name: {axis: length for axis, length in axes.items() if axis} for name, axes in self.axes.items()}
        return replace(self, inputs=inputs, axes=free)

    def attempts(self) -> tuple[Program, ...]:
        """The variants to try, the best first. With a KV cache any number of rows is possible."""
        cached = any(name.startswith(PAST_NAME) for name in self.inputs)
        return (self,) if cached or self.name != "model" else (self, self.row_by_row())


@dataclass(frozen=True)
class Programs:
    """All programs of a model, in the order in which they are called."""

    form: Form
    parts: tuple[Program, ...]

    def part(self, name: str) -> Program:
        return next(part for part in self.parts if part.name == name)


class ModelProgram(nn.Module):
    """A module that calls a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model
        self.eval()


def past_name(layer: int, part: str, side: str = "") -> str:
    """The name of a tensor of the KV cache, as is usual for exported models."""
    return f"{PAST_NAME}.{layer}.{side + '.' if side else ''}{part}"


def present_name(layer: int, part: str, side: str = "") -> str:
    return past_name(layer, part, side).replace(PAST_NAME, "present")


def named_layers(cache: Any, layers: Sequence[int], side: str = "") -> Tensors:
    """The keys and values of these layers, under the names of outputs."""
    return {
        present_name(layer, part, side): getattr(cache.layers[layer], f"{part}s")
        for layer in layers
        for part in ("key", "value")
    }
