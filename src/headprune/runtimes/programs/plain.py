"""A model as one pass: whatever its task takes, and whatever it gives that is a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from headprune.runtimes.programs.spec import (
    BATCH,
    SEQUENCE,
    SOURCE,
    TARGET,
    Axes,
    Program,
    Programs,
    Tensors,
    Whole,
)
from headprune.runtimes.spec import Source

LEFT_OUT = ("loss", "past_key_values")
FIXED = {"bbox": 1, "pixel_mask": 2}  # this many of its last axes have a length that the model knows
OF_ANY_LENGTH = ("inputs_embeds", "input_values", "encoder_hidden_states")  # numbers whose second axis is a length


class Pass(Whole):
    def __init__(self, model: Any, constants: Mapping[str, Any]) -> None:
        super().__init__(model)
        self.constants = dict(constants)

    def forward(self, inputs: Tensors) -> Tensors:
        return tensors_of(self.model(**inputs, **self.constants))


def tensors_of(output: Any) -> Tensors:
    """The tensors in what a model gives. What an encoder says beside what its decoder makes of it is not asked for."""
    named = output if isinstance(output, Mapping) else {f"output_{n}": value for n, value in enumerate(output)}
    return {
        name: value
        for name, value in named.items()
        if isinstance(value, torch.Tensor) and name not in LEFT_OUT and not name.startswith("encoder_")
    }


def plain_programs(source: Source) -> Programs:
    given = source.task.inputs(source.batch)
    inputs = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    constants = {name: value for name, value in given.items() if name not in inputs and value is not None}
    axes = {name: axes_of(name, value) for name, value in inputs.items()}
    return Programs("plain", (Program("model", Pass(source.model, constants), inputs, axes),))


def axes_of(name: str, tensor: torch.Tensor) -> Axes:
    """Which axes may have any length: those of ids and masks, and of sound; an image has the size it was made for."""
    free = tensor.dim() - FIXED.get(name, 0) if not tensor.is_floating_point() else 1
    if tensor.is_floating_point() and name in OF_ANY_LENGTH:
        free = min(2, tensor.dim())
    return dict(zip(range(free), _names(name, tensor.dim()), strict=False))


def _names(name: str, axes: int) -> Iterator[str]:
    """Runtimes take two axes of one name for equally long, so what a decoder reads has a name of its own."""
    yield BATCH
    yield from (f"choices_{number}" for number in range(axes - 2))
    yield {"decoder": TARGET, "encoder": SOURCE}.get(name.partition("_")[0], SEQUENCE)
